"""Users' graders and environments: each file imports its neighbours, also where two folders have modules of one name.

Python keeps one module for each name. So a folder is entered before its functions are loaded or called: it comes first
on the path, and its modules replace others of the same names until another folder is entered.
"""

import ast
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

from config import ConfigError

entered = ""  # the folder whose modules imports find now; "": none
_modules: dict[str, dict[str, ModuleType]] = {}  # modules of each folder that is not entered now
_hidden: dict[str, ModuleType] = {}  # modules from elsewhere with a name that the entered folder has too
_shared: set[str] = set()  # modules of the entered folder that were loaded before: it is the folder of our rooms


def enter(folder: str) -> None:
    """Leave the entered folder, and let imports find the modules of `folder` first; "": only leave."""
    global entered, _hidden, _shared
    if folder == entered:
        return
    if entered:
        if entered in sys.path:
            sys.path.remove(entered)
        own = [name for name in sys.modules if name not in _shared and _place(name) == entered]
        _modules[entered] = {name: sys.modules[name] for name in own}
        for name in own:
            del sys.modules[name]
        sys.modules.update(_hidden)
    entered, _hidden, _shared = folder, {}, set()
    if folder:
        sys.path.insert(0, folder)
        names = names_in(folder) - sys.stdlib_module_names
        loaded = [name for name in sys.modules if name.partition(".")[0] in names]
        _shared = {name for name in loaded if os.path.realpath(_place(name)) == os.path.realpath(folder)}
        _hidden = {name: sys.modules[name] for name in loaded if name not in _shared}
        for name in _hidden:
            del sys.modules[name]
        sys.modules.update(_modules.get(folder, {}))


def check_name(kind: str, name: str, built_in: Iterable[str], others: str = "") -> None:
    """Raise ConfigError if `name` cannot be that of a user's function, a `kind` such as "grader". Imports nothing."""
    source, _, function = name.rpartition(":")
    if not source or not function:
        raise ConfigError(
            f"{kind} {name!r} is not built in; take one of {', '.join(built_in)}, or name your own function "
            f"as package.module:function or path/to/file.py:function{others}"
        )
    if source.endswith(".py") and not os.path.isfile(source):
        raise ConfigError(f"{kind} {name!r}: there is no file {os.path.abspath(source)}; correct the path")


def load_function(kind: str, name: str, arguments: str) -> Callable:
    """Return the function that `name` leads to, and stay in its folder. Raises ConfigError if there is none.

    Modules and paths start from the working directory.
    """
    source, _, function = name.rpartition(":")
    try:
        found = getattr(load_module(source), function, None)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{kind} {name!r}: cannot import {source} from {os.getcwd()}: {type(error).__name__}: {error}; "
            "correct the name, or the code that fails"
        ) from error
    if not callable(found):
        raise ConfigError(f"{kind} {name!r}: {source} has no such function; define {function}{arguments}")
    return found


def load_module(source: str) -> ModuleType:
    """Enter the folder of a file, or for a module the working directory, and import it.

    Raises ImportError if a name could mean two modules.
    """
    if not source.endswith(".py"):
        enter(os.getcwd())
        module = importlib.import_module(source)
        file = Path(getattr(module, "__file__", None) or "/")
        if file.suffix == ".py" and file.is_relative_to(entered):
            check_names(file, Path(entered))
        return module
    file = Path(source).absolute()
    enter(str(file.parent))
    check_names(file, file.parent)
    name = f"user:{source}"  # no import statement can spell it, so it hides no other module
    spec = importlib.util.spec_from_file_location(name, source)
    assert spec and spec.loader, f"{source} ends in .py"
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def said(error: BaseException) -> str:
    """Return the kind and the text of an exception, whose own function makes the text."""
    try:
        text = str(error)
    except BaseException:
        text = "(its text cannot be made)"
    return f"{type(error).__name__}: {text}"


def names_in(folder: str) -> set[str]:
    """Return the names of the modules and packages in `folder`."""
    with os.scandir(folder) as entries:
        paths = [Path(entry) for entry in entries]
    return {path.stem for path in paths if path.suffix == ".py" or os.path.isfile(path / "__init__.py")}  # or no right


def check_names(source: Path, folder: Path) -> None:
    """Raise ImportError if `source`, or a neighbour that it imports, imports a name that is also a module of Python.

    The module that it got would depend on the modules that are loaded already.
    """
    names, files = names_in(str(folder)), [source]
    for file in files:  # grows
        for name in sorted(imports(file) & names):
            path = next(p for p in (folder / name / "__init__.py", folder / f"{name}.py") if os.path.isfile(p))
            if path == file == source and path.name != "__init__.py":
                raise ImportError(f"{file} imports {name}, and would find itself; rename the file")
            if name in sys.stdlib_module_names:
                raise ImportError(f"{file} imports {name}, which is {path} and also a module of Python; rename {path}")
            files += [path] if path not in files else []


def imports(file: Path) -> set[str]:
    """Return the top-level names that a file imports anywhere, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def _place(name: str) -> str:
    """Return the folder of a loaded module, or of its package; "" if it is unknown."""
    top = sys.modules.get(name.partition(".")[0])
    places = [*(getattr(top, "__path__", None) or []), getattr(top, "__file__", None) or ""]
    return os.path.dirname(places[0])
