"""Import arrows run one way: who may import whom, read from the sources.

Decision: 0057.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

pytestmark = pytest.mark.core
ROOT = Path(__file__).resolve().parents[1]

# Part -> the parts that it may import. `top` is the modules directly in whale/ that hold values only.
_TOP = {"whale.errors", "whale.config", "whale.started", "whale.log", "whale.python", "whale.cgroup", "whale.imports"}
_TOP |= {"whale.cpu_load", "whale.token_listener"}
ALLOWED: dict[str, set[str]] = {
    # the lazy public API
    "whale": _TOP | {"whale.annotations", "whale.ir", "whale.runtime", "whale.frontends", "whale.tools"},
    "whale.errors": set(),
    "whale.config": {"whale.errors"},
    "whale.started": {"whale.errors"},
    "whale.log": {"whale.errors", "whale.started"},
    "whale.python": set(),
    "whale.quiet": set(),
    "whale.cgroup": set(),
    "whale.cpu_load": set(),
    "whale.token_listener": set(),
    "whale.imports": set(),
    "whale.replicas": set(),
    "whale.annotations": {"whale.errors", "whale.runtime"},  # a scope acts on the context, once it is entered
    "whale.ir": {"whale.errors"},
    "whale.sharding_rules": {"whale.errors", "whale.ir"},
    "whale.passes": {
        "whale.errors",
        "whale.ir",
        "whale.sharding_rules",
        "cost_model",
    },  # FLOPs of a node have one place
    "whale.kernels": {"whale.ir", "whale.sharding_rules", "whale.passes", "cost_model"},  # how loops count
    "whale.partition": {"whale.errors", "whale.ir", "whale.sharding_rules", "whale.passes", "whale.kernels"},
    "whale.planner": _TOP
    | {"whale.ir", "whale.sharding_rules", "whale.passes", "whale.kernels", "whale.partition", "cost_model"},
    "whale.capture": {"whale.errors", "whale.ir"},
    "whale.distributed": _TOP | {"whale.ir", "whale.passes", "whale.replicas", "whale_ops"},
    "whale.runtime": _TOP
    | {"whale.ir", "whale.sharding_rules", "whale.passes", "whale.planner", "whale.capture"}
    | {"whale.kernels", "whale.partition", "whale.distributed", "whale.replicas", "whale_ops", "cost_model"},
    "whale.frontends": _TOP
    | {"whale.annotations", "whale.ir", "whale.capture", "whale.passes", "whale.planner", "whale.kernels"}
    | {"whale.partition", "whale.distributed", "whale.runtime", "whale.launcher", "whale_ops"},
    "whale.tools": _TOP
    | {"whale.ir", "whale.capture", "whale.passes", "whale.kernels", "whale.partition", "whale.planner"}
    | {"whale.distributed", "whale.runtime", "whale_ops", "cost_model"},
    "whale.horovod": {"whale.imports"},
    "whale.epl": {"whale.frontends", "whale.imports"},
    "whale.ray": {"whale.frontends"},
    "whale.launcher": {
        "whale.cgroup",
        "whale.errors",
        "whale.imports",
        "whale.ir",
        "whale.started",
        "whale.log",
        "whale.python",
        "whale.quiet",
        "whale.config",
        "whale.replicas",
        "whale.token_listener",
        "whale_ops",
    },
    "whale.doctor": {  # works where TensorFlow does not
        "whale",
        "whale.errors",
        "whale.python",
        "whale.cgroup",
        "whale.cpu_load",
        "whale.ir",
        "whale.launcher",
        "whale_ops",
    },
    "whale.cli": {
        "whale",
        "whale.config",
        "whale.errors",
        "whale.log",
        "whale.quiet",
        "whale.cgroup",
        "whale.launcher",
        "whale.doctor",
        "whale.tools",
        "whale.ir",
        "whale.runtime",
    }
    | {"whale.planner", "cost_model"},
    "whale.__main__": {"whale.cli"},
    "whale_ops": {"whale.errors"},
    "cost_model": {"whale.errors", "whale.log", "whale.ir", "whale.sharding_rules", "whale_ops"},
}
# Inside a part: its packages and the modules beside them, from the lowest up; each may import those before it.
PACKAGES: dict[str, tuple[str, ...]] = {
    "whale.config": ("values", "keys", "deepspeed", "reading", "page"),
    "whale.sharding_rules": ("notation", "base", "binding", "embedding", "registry", "empty", "graph")
    + ("math", "nn", "structure"),
    "whale.passes": (
        "run_passes",
        "settings",
        "analysis",
        "elementwise",
        "normalize",
        "propagation",
        "autoshard",
        "resharding",
    )
    + ("memory", "verify", "plan_builder", "pass_manager"),
    "whale.passes.normalize": ("folding", "emitter", "embedding", "*"),
    "whale.kernels": (
        "xla",
        "choices",
        "elementwise",
        "clusters",
        "matmuls",
        "einsums",
        "updates",
        "loops",
        "nn",
        "generators",
        "substitute",
    ),
    "whale.partition": (
        "resharding",
        "ring_attention",
        "embedding",
        "spmd",
        "rank_mapping",
        "axis_partitioner",
        "mesh",
        "pipeline",
        "variable_use",
        "lower",
        "verify_saved_plan",
    ),
    "whale.planner": (
        "analytic_search",
        "graph_search",
        "evaluate",
        "report",
        "run_described",
        "hugging_face",
        "ask",
        "replan",
        "why",
        "offers",
        "jobs",
    ),
    "whale.runtime": ("variables", "saved_plan", "context", "elastic", "scopes", "annotate", "*")
    + ("start", "input", "compile", "function", "checkpoint"),
    "whale.frontends": (
        "first_whale",
        "layers",
        "keras",
        "tf1",
        "horovod",
        "tf_checkpoints",
        "start",
        "tf_distribute",
        "epl",
        "launch",
    )
    + ("on_ray",),
    "whale.frontends.tf1": ("activation", "*", "install"),
    "whale.tools": ("models", "*", "profile"),
    "whale.launcher": ("*", "job", "scale_up", "run", "top"),
    "cost_model": (
        "figures",
        "hardware",
        "kernels",
        "simulator",
        "cluster",
        "analytic",
        "graph",
        "validation",
        "calibrate",
        "fit_stack",
    ),
}
SEARCH = "whale.planner.graph_search"  # the search over graphs
COMPILED_BY = {"Program", "Plan", "PlanSettings", "Made", "FirstLayouts"}  # what functions of a compiler take and give
TENSORFLOW = {"tensorflow", "keras", "tf_keras"}
HELP_OF_EVERY_VERB = """
import contextlib
from whale.cli import make_parser
for action in make_parser()._actions:
    for verb in action.choices or ():
        with contextlib.suppress(SystemExit):
            make_parser().parse_args([verb, "--help"])
"""
MAY_IMPORT_TENSORFLOW = {
    "whale.capture",
    "whale.distributed",
    "whale.runtime",
    "whale.frontends",
    "whale.tools",
    "whale_ops",
}


def part(module: str) -> str:
    """The part of the project that a module belongs to: whale.ir for whale.ir.text."""
    names = module.split(".")
    return ".".join(names[:2]) if names[0] == "whale" else names[0]


def sources() -> list[Path]:
    return [path for top in ("whale", "whale_ops", "cost_model") for path in sorted((ROOT / top).rglob("*.py"))]


def module_name(path: Path) -> str:
    names = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import in a file, those inside functions as well."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                # `from whale.cli import run` imports the module whale.cli.run.
                child = f"{origin}.{alias.name}"
                yield node.lineno, child if _is_module(child) else origin


def _is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def violations(path: Path) -> list[str]:
    own = part(module_name(path))
    found = []
    for line, module in imports(path):
        target, top = part(module), module.split(".")[0]
        where = f"{path.relative_to(ROOT)}:{line}"
        if top in TENSORFLOW and own not in MAY_IMPORT_TENSORFLOW:
            found.append(f"{where}: {own} may not import TensorFlow ({module})")
        elif top in ("whale", "whale_ops", "cost_model") and target != own and target not in ALLOWED.get(own, set()):
            found.append(f"{where}: {own} may not import {target}")
    return found


def test_every_part_is_in_the_table() -> None:
    assert {part(module_name(path)) for path in sources()} <= set(ALLOWED)


def test_arrows_run_one_way() -> None:
    graphlib.TopologicalSorter(ALLOWED).prepare()  # raises on a cycle


@functools.cache
def arrows() -> dict[str, set[str]]:
    """Module -> the modules of the project that it imports."""
    return {
        module_name(path): {m for _, m in imports(path) if m.split(".")[0] in ("whale", "whale_ops", "cost_model")}
        for path in sources()
    }


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = {module: targets - {module} for module, targets in arrows().items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises on a circle, and names it


def rank_in(part: str, module: str) -> int | None:
    """Returns where a module, or its package, stands in the order of a part; None: the module is elsewhere."""
    if not module.startswith(f"{part}."):
        return None
    package, order = module.removeprefix(f"{part}.").split(".")[0], PACKAGES[part]
    if package not in order and "*" not in order:
        raise AssertionError(f"{module}: {part} has no package or module {package!r} in PACKAGES")
    return order.index(package if package in order else "*")


def upward(part: str, graph: Mapping[str, set[str]]) -> list[str]:
    found = []
    for module, targets in graph.items():
        here = rank_in(part, module)
        for target in sorted(targets) if here is not None else ():
            there = rank_in(part, target)
            if there is not None and there > here:
                found.append(f"{module} imports {target}, which is above it")
    return found


@pytest.mark.parametrize("part", PACKAGES)
def test_no_package_imports_one_above_it(part: str) -> None:
    assert upward(part, arrows()) == []


def test_an_upward_arrow_is_seen() -> None:
    graph = {
        "whale.passes.analysis.scopes": {"whale.passes.autoshard"},
        "whale.passes.pass_manager": {"whale.passes.analysis"},
    }
    assert upward("whale.passes", graph) == [
        "whale.passes.analysis.scopes imports whale.passes.autoshard, which is above it"
    ]
    with pytest.raises(AssertionError, match="no package or module 'attic'"):
        upward("whale.passes", {"whale.passes.attic.old": set()})


def test_imports_follow_the_table() -> None:
    assert [line for path in sources() for line in violations(path)] == []


def test_the_check_sees_what_it_must(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("whale/ir", "whale/passes"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "whale" / "passes" / "check.py").write_text("")
    bad = tmp_path / "whale" / "ir" / "bad.py"
    bad.write_text(
        "import tensorflow as tf\ndef f():\n    from ..passes import check\nimport whale.sharding_rules.notation\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert violations(bad) == [
        "whale/ir/bad.py:1: whale.ir may not import TensorFlow (tensorflow)",
        "whale/ir/bad.py:4: whale.ir may not import whale.sharding_rules",
        "whale/ir/bad.py:3: whale.ir may not import whale.passes",
    ]


def compiler_functions(tree: ast.Module) -> list[str]:
    """Parameters and fields of a module that are functions which give programs or plans, or take settings or plans."""
    aliases = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }

    def is_compiler(annotation: ast.expr, known: frozenset[str] = frozenset()) -> bool:
        for node in ast.walk(annotation):
            if isinstance(node, ast.Name) and node.id in aliases.keys() - known:
                if is_compiler(aliases[node.id], known | {node.id}):
                    return True
            if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("Callable"):
                taken, given = node.slice.elts if isinstance(node.slice, ast.Tuple) else (node.slice, node.slice)
                if _names(given) & COMPILED_BY or _names(taken) & (COMPILED_BY - {"Program"}):
                    return True
        return False

    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign):
            here = [(ast.unparse(node.target), node.annotation)]
        elif isinstance(node, ast.arguments):
            every = [*node.posonlyargs, *node.args, *node.kwonlyargs]
            here = [(one.arg, one.annotation) for one in every if one.annotation is not None]
        else:
            continue
        found += [name for name, annotation in here if is_compiler(annotation)]
    return found


def _names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def test_the_search_over_graphs_calls_the_compiler_and_is_handed_none_of_it() -> None:
    graph = arrows()
    search = [module for module in graph if module.startswith(f"{SEARCH}.")]
    called = set().union(*(graph[module] for module in search))
    assert {"whale.partition.lower", "whale.kernels.substitute"} <= called
    trees = {module: ast.parse(ROOT.joinpath(*module.split(".")).with_suffix(".py").read_text()) for module in search}
    assert {module: found for module, tree in trees.items() if (found := compiler_functions(tree))} == {}


def test_a_function_of_the_compiler_is_seen() -> None:
    tree = ast.parse(
        "Lower = Callable[[Program, Plan], list[Program]]\n"
        "class Environment:\n    again: Callable[[PlanSettings], Program] | None\n    rates: Sequence[Rates]\n"
        "def search(lower: Lower, *, seconds: Callable[[Node], float]) -> Callable[[ParallelStrategy], Program]: ...\n"
    )
    assert compiler_functions(tree) == ["again", "lower"]


def loaded_after(code: str) -> set[str]:
    """The modules that a fresh Python has loaded after some code."""
    tail = "\nimport sys; sys.stdout.write('\\n' + ' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code + tail], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_importing_whale_loads_next_to_nothing() -> None:
    loaded = loaded_after("import whale")
    assert not loaded & {"tensorflow", "numpy", "networkx", "rich", "msgspec"}
    assert {name for name in loaded if name.split(".")[0] in ("whale", "whale_ops")} == {"whale"}


def test_public_names_that_need_no_tensorflow_load_none() -> None:
    loaded = loaded_after("import whale\nwhale.Config; whale.WhaleError; whale.replica")
    assert not loaded & TENSORFLOW
    assert {"whale.config", "whale.errors", "whale.annotations"} <= loaded


def test_the_command_starts_without_heavy_modules() -> None:
    loaded = loaded_after(HELP_OF_EVERY_VERB)
    assert "whale.cli.show" in loaded
    assert not loaded & {"tensorflow", "numpy", "networkx"}


def test_without_tensorflow_the_error_says_what_to_install() -> None:
    # None in sys.modules makes Python say that there is no such module.
    block = "import sys; sys.modules['tensorflow'] = None\n"
    public = "import whale\ntry:\n    whale.function\nexcept whale.InstallError as error:\n    print(error)"
    verb = "from whale.cli import main; sys.exit(main(['plan', 'setup.py']))"
    done = [
        subprocess.run([sys.executable, "-c", block + code], cwd=ROOT, capture_output=True, text=True, check=False)
        for code in (public, verb)
    ]
    assert done[0].stdout.startswith("whale.function needs TensorFlow\n  given: no TensorFlow in ")
    assert done[1].returncode == 2 and done[1].stderr.startswith("whale plan: whale plan needs TensorFlow\n")


def test_what_type_checkers_see_is_loaded() -> None:
    import whale

    shown = {}
    for node in ast.parse((ROOT / "whale/__init__.pyi").read_text()).body:
        if isinstance(node, ast.ImportFrom):
            (alias,) = node.names
            assert alias.name == alias.asname and node.module is not None
            shown[alias.name] = node.module
    assert shown == whale._modules()
    first = {name for name, module in shown.items() if module == "whale.frontends.first_whale"}
    assert first == {"auto_parallel", "cluster", "replicate", "set_default_strategy"}
    assert set(whale.__all__) == shown.keys() - first | {"__version__"} and len(whale.__all__) == len(
        set(whale.__all__)
    )


def test_every_name_is_where_the_stub_says() -> None:
    import whale

    for name, module in whale._modules().items():
        source = ROOT.joinpath(*module.split("."))
        inside = source / f"{name}.py"
        text = (source / "__init__.py" if source.is_dir() else source.with_suffix(".py")).read_text()
        defined = re.search(
            rf"^(?:def {name}\(|class {name}\b|{name} = |.*\bimport {name} as {name}$)", text, re.MULTILINE
        )
        assert defined or inside.exists(), f"{module} has no {name}"


def test_a_name_that_does_not_exist() -> None:
    import whale

    unknown = "replicate_all"
    with pytest.raises(AttributeError, match=f"has no attribute '{unknown}'"):
        getattr(whale, unknown)
    assert set(whale.__all__) <= set(dir(whale))
