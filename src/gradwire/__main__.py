"""The command `gradwire`, which is also `python -m gradwire`: whichever installed package registers itself runs it."""

import sys
from importlib.metadata import entry_points


def main() -> int:
    """Run the command that is registered as `gradwire.commands`; status 1 if no package that is installed has one."""
    registered = entry_points(group="gradwire.commands")
    if not registered:
        print("gradwire: commands are in gradwire_lab, which is missing: pip install . in the clone", file=sys.stderr)
        return 1
    return int(next(iter(registered)).load()())


if __name__ == "__main__":
    sys.exit(main())
