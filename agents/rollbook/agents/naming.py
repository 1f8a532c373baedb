"""What a person's code is called: agents, judges, scripts, datasets by one name, in every command and setting.

`my_agent.MathAgent` and `my_agent:MathAgent` are imported; `my_agent.py:MathAgent` is read from that file. Processes
that judge import this and no HTTP client, so it stays small.
"""

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import linecache
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import WorkflowError

_STATE = "_rollbook_file_state"


def load(name: str, what: str = "workflow") -> Any:
    """What a name stands for. The current directory is importable, and so is the folder of a file that is named; a
    file is looked for in the current directory, then along the import path. Raises WorkflowError.

    what: to call it in errors.
    """
    _importable(os.getcwd())  # stays: agents import lazily
    where, colon, attributes = name.rpartition(":") if ":" in name else (name, "", "")
    rest = attributes.split(".") if colon else []
    if where.endswith(".py"):
        if not all(part.isidentifier() for part in rest):
            raise _no_name(name, what)
        found, known = _read(where, name, what), where
    else:
        parts = where.split(".")
        if not all(part.isidentifier() for part in [*parts, *rest]):
            raise _no_name(name, what)
        if colon:
            found, known = _import(where, name, what), where
        else:
            found, known, rest = _import(parts[0], name, what), parts[0], parts[1:]
            while rest and inspect.ismodule(found) and not hasattr(found, rest[0]):
                submodule = f"{known}.{rest[0]}"
                if not hasattr(found, "__path__") or importlib.util.find_spec(submodule) is None:
                    break
                found, known, rest = _import(submodule, name, what), submodule, rest[1:]
    for part in rest:
        if not hasattr(found, part):
            raise _missing(part, found, known, name, what)
        found, known = getattr(found, part), f"{known}.{part}"
    if inspect.ismodule(found):
        example = f"{name}:MathAgent" if where.endswith(".py") else f"{name}.MathAgent"
        raise WorkflowError(f"{what} {name!r} is a module; name the class or function in it, as {example!r}")
    return found


def _no_name(name: str, what: str) -> WorkflowError:
    return WorkflowError(f"{what} {name!r} names nothing; expected 'my_agent.MathAgent' or 'my_agent.py:MathAgent'")


def _missing(part: str, found: Any, known: str, name: str, what: str) -> WorkflowError:
    names = [n for n in dir(found) if not n.startswith("_")]
    close = difflib.get_close_matches(part, names, n=1)
    file = getattr(found, "__file__", None)
    return WorkflowError(
        f"{what} {name!r}: {known} has no {part!r}"
        + (f" (it was imported from {file})" if file else "")
        + (f"; did you mean {close[0]!r}?" if close else f"; it has {', '.join(names[:12]) or 'nothing public'}")
    )


def _importable(folder: str) -> None:
    if folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)


def _read(file: str, name: str, what: str) -> ModuleType:
    """The module of a file, read again when the file has changed. Its neighbours are importable from it, as for
    `python FILE.py`.
    """
    path = next((p for p in (Path(folder, file) for folder in ["", *sys.path]) if p.is_file()), None)
    if path is None:
        raise WorkflowError(f"{what} {name!r}: there is no file {file} in {os.getcwd()} or on PYTHONPATH")
    path = path.resolve()
    stat = path.stat()
    state = (stat.st_mtime_ns, stat.st_size)
    loaded = sys.modules.get(path.stem)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        if getattr(loaded, _STATE, state) == state:
            return loaded
        loaded = None
    # Its own name where nobody else has that: `json.py` must not become everybody's json.
    is_free = loaded is None and path.stem.isidentifier() and path.stem not in sys.stdlib_module_names
    module_name = path.stem if is_free else f"_rollbook_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if module_name in sys.modules and getattr(sys.modules[module_name], _STATE, None) == state:
        return sys.modules[module_name]
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
    setattr(module, _STATE, state)
    linecache.checkcache(str(path))
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the file's own code raises
        del sys.modules[module_name]
        raise WorkflowError(_import_story(file, name, error, what)) from error
    return module


def _import(module: str, name: str, what: str) -> Any:
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(error.name + ".")):
            raise WorkflowError(
                f"{what} {name!r}: there is no module {error.name!r} in {os.getcwd()} or on PYTHONPATH; "
                "start from the folder that holds it, name the file as 'FILE.py:NAME', or install it"
            ) from error
        raise WorkflowError(_import_story(module, name, error, what)) from error
    except Exception as error:  # whatever the module's own code raises
        raise WorkflowError(_import_story(module, name, error, what)) from error


def _import_story(module: str, name: str, error: BaseException, what: str) -> str:
    """The import's own traceback: frames of this file and of the import machinery say nothing."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and "importlib" not in frame.filename
    ]
    lines = [*traceback.format_list(frames), *traceback.format_exception_only(error)]
    return f"{what} {name!r}: importing {module} failed:\n" + "".join(lines).rstrip()
