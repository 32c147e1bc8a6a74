"""`python -m anymamba` is the same command as `anymamba`."""

from anymamba.cli import main

if __name__ == "__main__":
    main()
