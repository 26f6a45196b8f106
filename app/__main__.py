"""`python -m app` is the `towpath` command."""

from app.cli.main import main

if __name__ == "__main__":
    main()
