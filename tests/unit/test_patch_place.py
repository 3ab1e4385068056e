"""The place of the block: ahead of the first import that leads to Megatron, in sources that no one imports."""

import itertools
from pathlib import Path

import pytest

from optimus_cc_ext.errors import OptimusError
from optimus_cc_ext.tools.patch.place import Imports, find_place

NEIGHBOURS = {
    "leads.py": "import again\n",
    "again.py": "import os\nimport leads\nfrom megatron.core import mpu\n",
    "later.py": "def f():\n    import megatron.core\n",
    "broken.py": "import megatron.core\nthis is no Python\n",
    "package/__init__.py": "",
    "package/inside.py": "from . import other\n",
    "package/other.py": "from megatron.training import pretrain\n",
    "package/plain.py": "from .megatron import name\n",
    "package/megatron.py": "name = 1\n",
    "folder/no_init.py": "import megatron.core\n",
    "elsewhere/deep/far.py": "import megatron.core\n",
}
PLACES = {
    "the import itself": "import os\n>import megatron.core\n",
    "a neighbour": "import os\n>from leads import name\nimport megatron.core\n",
    "below docstring and future": '"""Doc."""\nfrom __future__ import annotations\n>import megatron.core\n',
    "not a function's": "import later\ndef f():\n    import megatron.core\n>import leads\n",
    "nor what only a checker reads": "if TYPE_CHECKING:\n    import megatron.core\n>import leads\n",
    "the else of what only a checker reads": ">if t.TYPE_CHECKING:\n    pass\nelse:\n    import megatron.core\n",
    "a package": "import package\nimport package.plain\n>from package import inside\n",
    "a folder without __init__": ">from folder.no_init import name\n",
    "in a try": "import os\n>try:\n    import leads\nexcept ImportError:\n    pass\n",
    "in an except": ">try:\n    import os\nexcept ImportError:\n    import leads\n",
    "in an if, with, for and class": ">if os:\n with a:\n  for b in c:\n   class D:\n    import leads\n",
    "by its name": "import importlib\n>core = importlib.import_module('megatron.core')\n",
    "a multiple import": ">import os, sys, megatron.core\n",
    "the same line": '>import sys; text = """\n"""; import leads\n',
    "a neighbour that cannot be read": "import broken\n>import leads\n",
    "a sys.path line": (
        "import os, sys\nsys.path.append(os.path.abspath(os.path.join(os.path.dirname(__file__), 'elsewhere')))\n"
        ">from deep import far\n"
    ),
    "a sys.path line with a name": (
        "import sys\nfrom pathlib import Path\nroot = Path(__file__).resolve().parent / 'elsewhere'\n"
        "if str(root) not in sys.path:\n    sys.path.insert(0, str(root))\n>from deep import far\n"
    ),
    "a sys.path line with a variable": (
        "import os, sys\nsys.path.insert(0, os.environ['OPTIMUS_CC_ELSEWHERE'])\n>from deep import far\n"
    ),
    "a sys.path line with a default": (
        "import os, sys\nsys.path += [os.getenv('OPTIMUS_CC_UNSET', os.environ.get('OPTIMUS_CC_ELSEWHERE'))]\n"
        ">from deep import far\n"
    ),
    "a sys.path line with several folders": (
        "import os, sys\nhere = os.path.dirname(__file__)\nsys.path.extend([here, os.path.join(here, 'elsewhere')])\n"
        ">from deep import far\n"
    ),
    "a sys.path line that cannot be read": "import sys\nsys.path.append(f())\nfrom deep import far\n>import leads\n",
    "the guard of a shim": "import runpy\nimport later\n>if __name__ == '__main__':\n    runpy.run_path('x.py')\n",
}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    for name, source in NEIGHBOURS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    return tmp_path / "train.py"


@pytest.mark.parametrize("marked", PLACES.values(), ids=PLACES)
def test_the_block_goes_ahead_of_the_first_import_that_leads_to_megatron(
    script: Path, marked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPTIMUS_CC_ELSEWHERE", str(script.parent / "elsewhere"))
    lines = marked.splitlines()
    [expected] = [number for number, line in enumerate(lines, 1) if line.startswith(">")]
    found, _ = find_place(marked.replace(">", "", 1).encode(), script, Imports.of(script))
    assert found == expected


@pytest.mark.parametrize(
    "line", ["sys.path.insert(0, os.environ['UNSET'])", "sys.path[:0] = folders", "sys.path = f()", "sys.path += f()"]
)
def test_a_sys_path_line_whose_folder_is_not_known_is_named(script: Path, line: str) -> None:
    imports = Imports.of(script)
    find_place(f"import os, sys\n{line}\nimport leads\n".encode(), script, imports)
    [said] = imports.unread
    assert said.startswith(f"{script}: line 2 puts ") and "into sys.path, which is unknown here" in said


@pytest.mark.parametrize(("source", "line"), [
    ("try:\n import megatron.core\nexcept ImportError:\n sys.path.insert(0, 'WITH')\n", 4),
    ("if True:\n sys.path.append('WITH')\n from megatron.core import mpu\n", 2),
    ("import led\n", 1), ("sys.path.append('WITH')\nimport led\n", None),
    ("sys.path.append('WITH')\nimport megatron.core\n", None),
    ("import megatron.core\nsys.path.append('WITH')\n", None),
    ("if True:\n sys.path.append('WITHOUT')\n import megatron.core\n", None),
])  # fmt: skip
def test_a_sys_path_line_that_leads_to_a_megatron_behind_the_block_is_named(
    script: Path, source: str, line: int | None
) -> None:
    """The line can be part of the very statement that imports Megatron, or of a module that this statement imports."""
    folder = script.parent / "with a megatron"
    (folder / "megatron" / "core").mkdir(parents=True)
    led, place = script.parent / "led.py", "sys.path.append('WITH')\n"
    led.write_text(f"{place}import megatron.core\n".replace("WITH", str(folder)))
    imports = Imports.of(script)
    find_place(source.replace("WITH", str(folder), 1).encode(), script, imports)
    file = led if "led" in source else script
    said = f"{file}: line {line} puts {folder} into sys.path behind the block. If Megatron is to come from there, start"
    assert list(imports.late.values()) == ([f"{said} with PYTHONPATH={folder}"] if line else [])
    assert (folder in itertools.chain(*imports.at_block)) == source.startswith("sys.path.append('WITH')")


def test_the_nearest_folder_above_with_a_megatron_and_pythonpath_are_searched(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = b"import later\nfrom examples.mimo import far\nimport leads\n"
    inner = tmp_path / "examples" / "mimo" / "train.py"
    inner.parent.mkdir(parents=True)
    (inner.parent / "far.py").write_text("import megatron.core\n")
    with pytest.raises(OptimusError, match="leads to Megatron"):
        find_place(source, inner, Imports.of(inner))
    (tmp_path / "megatron").mkdir()
    assert find_place(source, inner, Imports.of(inner)) == (2, "ahead of the import examples.mimo.far > megatron.core")
    (tmp_path / "megatron").rmdir()
    monkeypatch.setenv("PYTHONPATH", f"/nowhere:{tmp_path}")
    assert find_place(source, inner, Imports.of(inner))[0] == 2


@pytest.mark.parametrize(
    "source", ["from __future__ import annotations; import megatron.core\n", '"""Doc."""; import megatron.core\n',
               "import sys; sys.path.append('x'); import leads\n"],
)  # fmt: skip
def test_an_import_that_cannot_be_preceded_is_refused(script: Path, source: str) -> None:
    with pytest.raises(OptimusError, match=r"both in line 1\. Put them on lines of their own"):
        find_place(source.encode(), script, Imports.of(script))


def test_a_script_without_such_an_import_and_without_a_guard_is_led_to_the_launcher(script: Path) -> None:
    with pytest.raises(OptimusError, match=rf"torchrun \.\.\. -m optimus_cc_ext {script}"):
        find_place(b"import later\nlater.f()\n", script, Imports.of(script))


def test_no_source_is_run(script: Path, tmp_path: Path) -> None:
    harm = f"open({str(tmp_path / 'run')!r}, 'w')\n"
    (tmp_path / "harmful.py").write_text(harm)
    source = f"import sys\nimport harmful\nsys.path.insert(0, {harm.strip()})\nimport leads\n"
    assert find_place(source.encode(), script, Imports.of(script))[0] == 4
    assert not (tmp_path / "run").exists()
