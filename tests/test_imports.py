"""Imports go downwards only: the direction of docs/architecture.md, read from the import statements themselves."""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "bsi"

# Modules that all others may import; they import no other module of the package.
FLOOR = {"devices", "errors", "io", "progress", "rng", "values"}

# From the mathematics up to the interfaces. A module may import its own layer and those below.
LAYERS = [
    {"brownian", "gaussian", "levels", "likelihood", "symbols"},
    {"methods"},
    {
        "adapters",
        "bound",
        "codec",
        "codec_file",
        "conditioning",
        "consistency",
        "control_variate",
        "denoiser",
        "discreteness",
        "elbo",
        "flow",
        "density",
        "grids",
        "latents",
        "formulations",
        "model",
        "objective",
        "oracle",
        "sampler",
        "sampling",
        "solvers",
        "variance",
    },
    {"recipe", "recipes"},
    {"runtime"},
    {"training"},
    {"evaluation", "integrations", "report", "studies", "cli", "app", "__main__"},
]

# Importable from above; they import only the lowest layer and themselves.
LEAVES = {"backbones", "data", "kernels", "metrics", "pictures"}

# The only two modules that use kernels: inside functions, and only where kernels can run.
HOOKS = {"backbones", "rng"}

# `Model.from_pretrained` and `Model.save_pretrained` call the functions above that read and write files.
UPWARDS = {("model", "runtime")}

FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def home(path: Path) -> str:
    """The module or folder directly below the package that a file belongs to."""
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imported(path: Path, at_once: bool = False) -> set[str]:
    """The modules and folders of this package that a file imports: anywhere in it, or when it is itself imported."""
    names = set()
    tree = ast.parse(path.read_text())
    for node in tree.body if at_once else ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute, so that they can be read"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    parts = [name.split(".") for name in names]
    return {part[1] for part in parts if part[0] == "bsi" and len(part) > 1}


def layer(name: str) -> int:
    return next(i for i, members in enumerate(LAYERS) if name in members)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_downwards(path):
    name, reached = home(path), imported(path) - FLOOR
    at_once = imported(path, at_once=True)
    assert not {"kernels"} & at_once - {name}
    assert not {other for here, other in UPWARDS if here == name} & at_once
    if name in HOOKS:
        reached -= {"kernels"}
    if name in FLOOR:
        assert reached == set()
    elif name in LEAVES:
        below = {"kernels": {"backbones"}, "metrics": {"data"}}.get(name, set())
        assert reached <= below | {name}, f"a leaf imports only itself and the lowest layer: {reached - below - {name}}"
    else:
        own = layer(name)
        for other in reached - LEAVES - {name}:
            # `bsi.Model` and the like are read from the package itself: a public name of the lower layers.
            if other[0].isupper() or other == "__version__":
                assert own > layer("model")
            else:
                assert layer(other) <= own or (name, other) in UPWARDS, f"{name} is below {other}"
        if reached & LEAVES:
            assert own > layer("model"), f"{name} is below the leaves' users: {reached & LEAVES}"


def test_every_module_has_a_place():
    assert {home(path) for path in FILES} <= FLOOR | LEAVES | set().union(*LAYERS)


def test_no_module_is_called_utils():
    assert not [path for path in FILES if path.stem in ("utils", "util", "helpers", "common", "misc")]


def test_no_two_files_and_no_two_classes_have_one_name():
    nodes = (node for path in FILES for node in ast.walk(ast.parse(path.read_text("utf-8"))))
    classes = [node.name for node in nodes if isinstance(node, ast.ClassDef)]
    files = [path.stem for path in FILES if path.stem != "__init__"]
    assert not [name for name, count in Counter(classes + files).items() if count > 1]


def without_torch(*modules: str) -> list[str]:
    """Which of the heavy packages a fresh interpreter has loaded after importing these."""
    code = f"import sys, {', '.join(modules)}; print(*[m for m in ('torch', 'numpy', 'PIL') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return run.stdout.split()


def test_importing_the_package_loads_no_torch():
    assert without_torch("bsi") == []


LIGHT = [
    path
    for path in FILES
    if home(path) in FLOOR | {"recipes"}
    or home(path) in {"methods", "recipe", "sampler", "values"}
    or path == PACKAGE / "cli" / "__init__.py"
]


def test_the_command_line_and_the_recipes_load_no_torch():
    modules = [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__") for path in LIGHT
    ]
    assert "torch" not in without_torch("bsi", *modules)


def test_public_names_resolve_when_used():
    import bsi

    for name in bsi.__all__:
        assert getattr(bsi, name) is not None
    assert set(bsi.__all__) <= set(dir(bsi))
    with pytest.raises(AttributeError, match="Modle"):
        bsi.Modle  # noqa: B018
