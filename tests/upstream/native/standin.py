"""A stand-in for a compiler: does what the source file's comments say, as slowly or as badly as they say."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path


def main(words: list[str]) -> int:
    """Read `// standin: WORD [NUMBER]` lines; write the output file last."""
    output = Path(words[words.index("-o") + 1])
    sources = [word for word in words if word.endswith((".cu", ".cpp"))]
    for source in sources:
        count = Path(f"{output}.runs")
        runs = int(count.read_text(encoding="utf-8")) if count.exists() else 0
        count.write_text(str(runs + 1), encoding="utf-8")
        for line in Path(source).read_text(encoding="utf-8").splitlines():
            if not line.startswith("// standin: "):
                continue
            word, _, number = line.removeprefix("// standin: ").partition(" ")
            if word == "hang" and runs < int(number):
                time.sleep(600)
            elif word == "work":
                until = time.process_time() + float(number)
                while time.process_time() < until:
                    pass
            elif word == "sleep":
                time.sleep(float(number))
            elif word == "killed" and runs < int(number):
                sys.stderr.write("nvcc error   : 'cicc' died due to signal 9 (Kill signal)\n")
                return 9
            elif word == "say":
                sys.stderr.write(f"{number}\n")
            elif word == "fail":
                return 1
            elif word == "stop" and hasattr(signal, "SIGSTOP"):
                os.kill(os.getpid(), signal.SIGSTOP)
    output.write_text("".join(sources), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
