"""Test targets that pytest runs."""

def pytest_test(name, srcs, data = [], deps = [], **attributes):
    """One py_test that runs pytest on `srcs`; the environment of `PYTHON_BIN_PATH` has pytest."""
    native.py_test(
        name = name,
        srcs = ["//bazel:pytest_main.py"] + srcs,
        main = "//bazel:pytest_main.py",
        args = ["$(location {})".format(source) for source in srcs],
        data = ["//:pyproject.toml"] + data,
        legacy_create_init = False,
        size = "medium",
        timeout = "long",  # for a machine that is busy with other things
        deps = deps,
        **attributes
    )
