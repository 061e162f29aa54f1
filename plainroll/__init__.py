"""plainroll as a package: `from plainroll.job import Job`. Nothing of ours takes a name outside of it.

Our files lie side by side and import each other by short names, as `from config import ConfigError`, which `python
train.py` needs. In the package each is `plainroll.config` and so on, and its imports of the others lead to those. So a
config.py or a model.py of your own is never hidden, and hides none of ours. docs/library.md shows how to use it.
"""

import builtins
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

HERE = Path(__file__).resolve().parent
ROOT = HERE / "_flat" if (HERE / "_flat").is_dir() else HERE.parent  # installed, or in the repository
NAMES = {path.stem for path in ROOT.glob("*.py")} | {path.parent.name for path in ROOT.glob("*/*.py")}
__path__ = [str(HERE), str(ROOT)]


def _import(
    name: str,
    globals: Mapping[str, object] | None = None,
    locals: Mapping[str, object] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> ModuleType:
    """`__import__` in our modules: ours are those of the package, all others what they are everywhere."""
    top = name.partition(".")[0]
    if level or top not in NAMES:
        return builtins.__import__(name, globals, locals, fromlist, level)
    found = builtins.__import__(f"plainroll.{name}", globals, locals, fromlist)
    return found if fromlist else sys.modules[f"plainroll.{top}"]


class _Loader(SourceFileLoader):
    """Loads one of our files with that `__import__`."""

    def exec_module(self, module: ModuleType) -> None:
        code = super().get_code(module.__name__)
        assert code, "a file of Python"
        vars(module)["__builtins__"] = vars(builtins) | {"__import__": _import}
        exec(code, vars(module))

    def get_code(self, fullname: str) -> CodeType | None:
        raise ImportError(f"{fullname} is no script; write python -m plainroll {fullname.partition('.')[2]}")


class _Finder:
    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        package, _, rest = name.partition(".")
        if package != __name__ or rest.partition(".")[0] not in NAMES:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec and spec.origin and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(name, spec.origin)
        return spec


sys.meta_path.insert(0, _Finder())
