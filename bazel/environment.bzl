"""The Python that everything is built for and tested with, and the TensorFlow and MPI that it sees.

That Python is $PYTHON_BIN_PATH, the one that `make setup` installed into .venv, or python3 on PATH, in this order. What to
compile with is asked of whale_ops/build.py, so that it stands in one place.

Decision: 0010.
"""

_BUILD = """
load("@bazel_tools//tools/python:toolchain.bzl", "py_runtime_pair")

package(default_visibility = ["//visibility:public"])

exports_files(["description.json"])

py_runtime(
    name = "python",
    interpreter_path = "{python}",
    python_version = "PY3",
)

py_runtime_pair(
    name = "python_pair",
    py3_runtime = ":python",
)

toolchain(
    name = "python_toolchain",
    toolchain = ":python_pair",
    toolchain_type = "@bazel_tools//tools/python:toolchain_type",
)
"""

_HEADERS = """
cc_library(
    name = "{name}.headers",
    hdrs = glob({globs}),
    includes = {folders},
)
"""

def _python(context, root):
    named = context.os.environ.get("PYTHON_BIN_PATH")
    made = root.get_child(".venv").get_child("bin").get_child("python")
    if named:
        return named
    if made.exists:
        return str(made)
    return str(context.which("python3"))

def _python_environment_impl(context):
    script = context.path(Label("//:whale_ops/build.py"))
    root = script.dirname.dirname
    python = _python(context, root)
    done = context.execute([python, "-m", "whale_ops.build", "--describe"], environment = {"PYTHONPATH": str(root)})
    if done.return_code != 0:
        fail("{}\nThis is what {} says. `make setup` installs one with all that is needed into .venv, and ".format(
            done.stderr.strip(),
            python,
        ) + "PYTHON_BIN_PATH=/path/to/python names another.")
    context.file("description.json", done.stdout)
    description = json.decode(done.stdout)
    build = _BUILD.format(python = python)
    libraries = []
    for number, library in enumerate(description["libraries"]):
        folders = []
        for index, folder in enumerate(library["include_folders"]):
            folders.append("include{}_{}".format(number, index))
            context.symlink(folder, folders[-1])
        build += _HEADERS.format(
            name = library["name"],
            globs = [folder + "/**" for folder in folders],
            folders = folders,
        )
        libraries.append(struct(
            name = library["name"],
            copts = library["compile_flags"],
            linkopts = library["link_flags"],
            headers = "@environment//:{}.headers".format(library["name"]),
            units = library["units"],
        ))
    context.file("BUILD", build)
    context.file("libraries.bzl", "FLAGS = {}\n\nCORE, OPS, LOOPBACK, CUDA = {}\n\nMPI = {}\n".format(
        description["flags"],
        libraries[:4],
        libraries[4:],
    ))

python_environment = repository_rule(
    implementation = _python_environment_impl,
    configure = True,
    environ = ["MPICC", "PATH", "PYTHON_BIN_PATH"],
    local = True,
)
