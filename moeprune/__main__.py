"""`python -m moeprune` is `moeprune`."""

from moeprune.cli import main

if __name__ == "__main__":
    main()
