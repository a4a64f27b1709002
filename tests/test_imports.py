"""Rules for the sources: who may import whom, and what no file may hold, such as machine paths and riddles."""

import ast
import functools
import importlib
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "condense"
# each unit with what it may import besides itself
ARROWS: dict[str, set[str]] = {name: set() for name in ("named", "version", "files", "architectures")}
ARROWS["config"] = {"named"}
ARROWS["tasks"] = {"files"}
ARROWS["results"] = {"files", "version"}
ARROWS["ops"] = {"config"} | ARROWS["config"]
ARROWS["methods"] = {"ops", "version"} | ARROWS["ops"]
ARROWS["baselines"] = {"methods"} | ARROWS["methods"]
ARROWS["state"] = {"methods"} | ARROWS["methods"]
ARROWS["plan"] = {"state"} | ARROWS["state"]
ARROWS["functional"] = {"plan"} | ARROWS["plan"]
ARROWS["serving"] = {"methods", "architectures"} | ARROWS["methods"]
ARROWS["latent"] = ARROWS["caches"] = {"functional"} | ARROWS["functional"]
ARROWS["models"] = {"caches", "latent", "serving", "version"} | ARROWS["caches"] | ARROWS["serving"]
# what one does with it: these never import each other
USES = ("train", "evaluate", "calibration")
for use in USES:
    ARROWS[use] = {"models", "tasks", "results"} | ARROWS["results"] | ARROWS["models"]
ARROWS["demo"] = {"evaluate"} | ARROWS["evaluate"]
ARROWS["plots"] = {"evaluate"} | ARROWS["evaluate"]
# the public face, which nothing but the command line looks at from inside
ARROWS["condense"] = {"demo", "calibration", "baselines"} | ARROWS["demo"]
ARROWS["__main__"] = set()  # the command's entry, which stands outside of the package
ARROWS["cli"] = {*USES, "serving", "plots", "condense"} | ARROWS["condense"]
FILES = sorted(SOURCE.rglob("*.py"))
# folders of `ops` that are a backend, each with what it may import of `ops` besides itself and the shared modules
BACKENDS: dict[str, set[str]] = {"reference": set(), "torch": set(), "triton": set(), "hopper": {"triton"}}
# the rooms of `ops` from below: each may import those before it
ROOMS = (
    "tensors", "entries", "spans", "latents", "types", "coarse", "checks", "recall", "step", "reference",
    "torch", "triton", "hopper", "backends", "api", "paged", "__init__",
)  # fmt: skip
MACHINE_PATH = re.compile(r"(?<![\w.~}])/(?:work|home|root|tmp|Users|mnt|workspace)/|[A-Z]:\\\\(?:Users|Windows)")
TEXTS = sorted(
    path
    for folder in ("src/condense", "tests", "benchmarks")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".py", ".json", ".md", ".toml", ".yaml", ".cfg"} and path != Path(__file__)
)
MOST_PARAMETERS = {"device": 12, "host": 8}
# others decide what these take: schemas of operations, transformers, vLLM; and the two public functions over tensors
LONG_SIGNATURES = {
    "ops/triton/step.py": {"_step"},
    "ops/triton/recall_store.py": {"_start"},
    "models/attention.py": {"condense_attention"},
    "models/masks.py": {"condense_mask"},
    "serving/vllm/backend.py": {"forward"},
    "functional.py": {"attention"},
    "latent.py": {"latent_attention"},
}


def unit_of(path):
    first = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    return "condense" if first == "__init__" else first


@functools.cache
def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imported(path):
    package, names = [*path.relative_to(SOURCE.parent).parts[:-1]], []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            for alias in node.names:
                below = SOURCE.parent.joinpath(*module.split("."), alias.name)
                is_module = below.is_dir() or below.with_suffix(".py").is_file()
                names.append(f"{module}.{alias.name}" if is_module else module)
    return names


def names_in(path, *package):
    """What a file imports of a package, by the name within it; of the package itself, by its last name."""
    for name in imported(path):
        parts, depth = tuple(name.split(".")), len(package)
        if parts[:depth] == package:
            yield (*parts, package[-1])[depth]


@pytest.mark.parametrize("unit", sorted(set(map(unit_of, FILES))))
def test_imports_point_down(unit):
    assert unit in ARROWS, f"say in this test what {unit} may import"
    for path in FILES:
        wrong = set(names_in(path, "condense")) - ARROWS[unit] - {unit} if unit_of(path) == unit else set()
        assert not wrong, f"{path.relative_to(SOURCE)} must not import {sorted(wrong)}"


@pytest.mark.parametrize("room", ROOMS)
def test_imports_point_down_inside_ops(room):
    files = [*(SOURCE / "ops").glob(f"{room}.py"), *(SOURCE / "ops" / room).rglob("*.py")]
    assert files
    others = BACKENDS.keys() - BACKENDS[room] - {room} if room in BACKENDS else set()
    for path in files:
        wrong = set(names_in(path, "condense", "ops")) - ({*ROOMS[: ROOMS.index(room) + 1], "ops"} - others)
        assert not wrong, f"{path.relative_to(SOURCE)} must not import {sorted(wrong)}"


def test_kernels_name_constants_without_their_module():
    """Triton keeps compiled kernels by what they call and by the constants that they name; it overlooks constants that
    they name through a module, so one that changes would leave the old kernel in use.
    """
    for path in FILES:
        if path.relative_to(SOURCE).parts[:2] not in {("ops", "triton"), ("ops", "hopper")}:
            continue
        tree = parsed(path)
        aliases = {x.asname or x.name for n in tree.body if isinstance(n, ast.ImportFrom) for x in n.names}
        functions = (n for n in tree.body if isinstance(n, ast.FunctionDef))
        for function in (n for n in functions if any("jit" in ast.unparse(x) for x in n.decorator_list)):
            inside = (n for statement in function.body for n in ast.walk(statement) if isinstance(n, ast.Attribute))
            found = [ast.unparse(n) for n in inside if isinstance(n.value, ast.Name) and n.value.id in aliases]
            assert not [name for name in found if name.rpartition(".")[2].isupper()], f"{path.name}: {function.name}"


def test_triton_stays_in_its_folders_and_the_reference_needs_torch_alone():
    for path in FILES:
        if path.relative_to(SOURCE).parts[:2] not in {("ops", "triton"), ("ops", "hopper")}:
            assert not any(name.split(".")[0] == "triton" for name in imported(path)), path
    for path in (SOURCE / "ops" / "reference").glob("*.py"):
        others = {name.split(".")[0] for name in imported(path)}
        assert others <= {*sys.stdlib_module_names, "torch", "condense"}


@pytest.mark.parametrize("path", sorted((ROOT / "tests" / "gpu").glob("*.py")), ids=lambda path: path.stem)
def test_what_only_a_gpu_runs_imports(path):
    """Elsewhere nothing collects these files, so a test that was renamed in another would go unseen."""
    importlib.import_module(f"gpu.{path.stem}")


def test_no_machine_paths():
    assert not [str(path) for path in TEXTS if MACHINE_PATH.search(path.read_text(encoding="utf-8"))]


def too_long(path):
    """Functions with too many parameters, but for kernels that the host starts, operations and commands."""
    name = path.relative_to(SOURCE).as_posix()
    for node in definitions(path):
        if not isinstance(node, ast.FunctionDef) or node.name in LONG_SIGNATURES.get(name, ()):
            continue
        decorators = " ".join(map(ast.unparse, node.decorator_list))
        where = "device" if re.search(r"(triton|gluon)\.jit", decorators) else "host"
        is_kernel = where == "device" and node.name.endswith("_kernel")
        is_command = name.startswith("cli/") and node.name.endswith("_command")
        if is_kernel or is_command or re.search("custom_op|register_fake", decorators):
            continue
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
        count = sum(x is not None and x.arg not in ("self", "cls") for x in every)
        if count > MOST_PARAMETERS[where]:
            yield f"{name}:{node.lineno} {node.name} ({where}): {count}"


def test_functions_take_few_parameters():
    assert not [found for path in FILES for found in too_long(path)]


@functools.cache
def definitions(path):
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(parsed(path)) if isinstance(node, kinds)]


def test_docstrings_begin_with_a_noun_or_a_verb():
    for path in (*FILES, *(ROOT / "benchmarks").rglob("*.py")):
        first_words = {(ast.get_docstring(node) or "").partition(" ")[0] for node in definitions(path)}
        assert not first_words & {"Of", "What", "Where", "How"}, path


def test_operations_have_one_class_of_a_name():
    nodes = [node for path in (SOURCE / "ops").rglob("*.py") for node in definitions(path)]
    names = [node.name for node in nodes if isinstance(node, ast.ClassDef)]
    assert len(names) > 20
    assert not [name for name, count in Counter(names).items() if count > 1]
