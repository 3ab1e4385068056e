"""`optimus-cc patch SCRIPT`: reads scripts, decides about each, and replaces those that change."""

import argparse
import ast
import os
import stat
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from optimus_cc_ext.errors import OptimusError
from optimus_cc_ext.tools.patch.block import Block, find, insert, remove
from optimus_cc_ext.tools.patch.place import Imports, find_place, parse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `optimus-cc patch`."""
    parser.add_argument(
        "scripts", type=Path, nargs="+", metavar="SCRIPT", help="an entry script, such as a fork's pretrain_gpt.py"
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument(
        "--check",
        action="store_true",
        help="only print the state and the Megatron found; status 1: refused in training",
    )
    action.add_argument("--undo", action="store_true", help="take the block out; every other byte stays")
    parser.add_argument("--force", action="store_true", help="replace, or take out, an edited block, or a newer one")


def run(options: argparse.Namespace, megatron: Callable[[], tuple[Iterable[str], bool]]) -> int:
    """Run the command, and return its status. Either every script is fit, and each is replaced as a whole, or none is.

    Args:
        megatron: returns lines about the Megatron that this process imports, for --check, and whether it would train.

    Raises:
        OptimusError: a script cannot be patched; the message names the file, the reason and the cure.
    """
    warnings.simplefilter("ignore")  # Compiling a script warns of the escapes in its strings.
    if options.check and len(options.scripts) > 1:  # Each may find a Megatron of its own, so each needs a process.
        command = [sys.executable, "-P", "-m", "optimus_cc_ext.tools.cli", "patch", "--check"]
        return max(subprocess.run([*command, script], check=False).returncode for script in options.scripts)
    if options.check:
        for line in _state(options.scripts[0]):
            print(line, flush=True)
        lines, trains = megatron()
        print(*lines, sep="\n")
        return 0 if trains else 1
    changes = [(script, *_change(script, options.undo, options.force)) for script in options.scripts]
    _replace({script: new for script, new, _ in changes if new is not None})
    for script, _, said in changes:
        print(f"{script}: {said}")
    return 0


def _change(script: Path, undo: bool, force: bool) -> tuple[bytes | None, str]:
    """Return what a script shall contain, or None if it stays, and what was done, in words."""
    source, block = _read(script)
    if block is not None and block.edited and not force:
        raise OptimusError(
            f"{script}: the lines of the block, {block.first} to {block.last}, were edited, and are left as they are. "
            f"--force overrides this:\n{block.edited}"
        )
    if block is not None and block.newer and not undo and not force:
        raise OptimusError(
            f"{script}: a newer release of Optimus-CC inserted the block at line {block.first}, which is left as it "
            "is. Install that release, or take the block out (--undo), or replace it by this release's (--force)"
        )
    bare = remove(source, block) if block is not None else source
    if undo:
        return (None, "not patched") if block is None else (bare, f"undone, the block stood at line {block.first}")
    imports = Imports.of(script)
    line, where = (block.first, "") if block is not None else find_place(source, script, imports)
    new = insert(bare, line)
    _verify(new, bare, script)
    return (
        (None, f"already patched at line {line}")
        if new == source
        else (new, "\n".join([f"patched at line {line} {where}".rstrip(), *imports.unread, *imports.late.values()]))
    )


def _verify(new: bytes, bare: bytes, script: Path) -> None:
    """Check a patched source against the one without the block.

    Raises:
        OptimusError: the block changes how the rest is read, or an import of Megatron stands ahead of it.
    """
    block, tree = find(new), parse(new, script)
    assert block is not None, "its markers are there"
    own = [i for i, each in enumerate(tree.body) if block.first <= each.lineno <= block.last]
    if found := Imports.of(script).first(tree, script, until=own[0] if own else None):
        raise OptimusError(
            f"{script}: line {found[1]} imports {' > '.join(found[2])} ahead of the block, which begins at line "
            f"{block.first}. Patch it anew: --undo, then again"
        )
    rest = [statement for i, statement in enumerate(tree.body) if i not in own]
    if len(own) != 1 or remove(new, block) != bare or _shape(rest) != _shape(parse(bare, script).body):
        raise OptimusError(f"{script}: with the block at line {block.first}, the other lines would read differently")


def _shape(body: list[ast.stmt]) -> list[tuple[object, ...]]:
    """Return the nodes of statements, without their positions."""
    nodes = ast.walk(ast.Module(body, []))
    return [
        (type(node), *(v for n in node._fields if not isinstance(v := getattr(node, n), ast.AST | list)))
        for node in nodes
    ]


def _state(script: Path) -> Iterator[str]:
    """Yield the state of a script, and let this process find the Megatron that the block finds.

    Raises:
        OptimusError: it cannot be patched.
    """
    (source, block), imports = _read(script), Imports.of(script)
    if block is None:
        line, where = find_place(source, script, imports)
        yield f"{script}: not patched; the block would stand at line {line} {where}"
    else:
        _verify(source, remove(source, block), script)
        state = " by a newer release" * block.newer + f", and edited:\n{block.edited}" * bool(block.edited)
        yield f"{script}: patched at line {block.first}{state}"
        imports.first(parse(source, script), script)
    yield from [*imports.unread, *imports.late.values()]
    ahead, behind = imports.at_block
    sys.path[:] = [*map(str, ahead), *sys.path, *map(str, behind)]


def _read(script: Path) -> tuple[bytes, Block | None]:
    if not script.is_file():
        raise OptimusError(f"{script} is no file. Give the path of an entry script, such as pretrain_gpt.py")
    source = script.read_bytes()
    try:
        return source, find(source)
    except OptimusError as error:
        raise OptimusError(f"{script}: {error}") from None


def _replace(sources: Mapping[Path, bytes]) -> None:
    """Replace the contents of scripts, each in one step; a symbolic link stays, and its target is replaced.

    Raises:
        OptimusError: one cannot be written; then none is replaced.
    """
    beside: dict[Path, str] = {}
    try:
        for script, source in sources.items():
            target, found = script.resolve(), script.stat()
            if not found.st_mode & stat.S_IWUSR:
                raise OptimusError(f"{script} is read-only. Let it be written, if that is meant: chmod u+w {script}")
            try:
                handle, beside[target] = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
                with open(handle, "wb") as file:
                    file.write(source)
                    os.fchmod(handle, stat.S_IMODE(found.st_mode))
                    os.fchown(handle, found.st_uid, found.st_gid)
            except OSError as error:
                raise OptimusError(
                    f"{script} cannot be replaced ({error.strerror}); no script was changed. Call this as its owner, "
                    f"who can write into {target.parent}"
                ) from None
        for target, new in beside.items():
            os.replace(new, target)
    finally:
        for new in beside.values():
            Path(new).unlink(missing_ok=True)
