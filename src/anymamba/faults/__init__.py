"""Known faults as data, and the engine that finds them in a log.

`known/*.toml` holds one kind of fault a file: symptom, cause, cures, how sure, where it was seen. `explain(source)` reads a
log of any encoding and size and answers with the first real cause, its consequences apart; "unknown" when it is unknown.
Used by `anymamba explain`, by native builds, and by the doctor's cross-references.
"""

from __future__ import annotations

from anymamba.faults.brief import Brief, brief
from anymamba.faults.catalogue import Fault, Fix, catalogue
from anymamba.faults.explain import Explanation, Finding, Outcome, explain

__all__ = ["Brief", "Explanation", "Fault", "Finding", "Fix", "Outcome", "brief", "catalogue", "explain"]
