"""What Debian's bazel-bootstrap lacks: it neither contains nor downloads the rule sets that Bazel itself asks for.

Needs the packages bazel-platforms, bazel-rules-java and bazel-rules-proto. Debian's bazel-rules-cc is for a newer Bazel,
so rules_cc forwards to the rules that Bazel 4 has built in. Nobody collects coverage here.
"""

_CC_RULES = [
    "cc_binary",
    "cc_import",
    "cc_library",
    "cc_proto_library",
    "cc_test",
    "cc_toolchain",
    "cc_toolchain_suite",
    "objc_library",
]

def _generated_repository_impl(context):
    for path, text in context.attr.files.items():
        context.file(path, text)

_generated_repository = repository_rule(
    implementation = _generated_repository_impl,
    attrs = {"files": attr.string_dict(doc = "path -> text")},
)

def debian_repositories():
    """Defines them for Debian's Bazel; another one finds its own."""
    if native.bazel_version:  # Debian's names none
        return
    native.local_repository(name = "platforms", path = "/usr/share/bazel/tools/platforms")
    native.local_repository(name = "rules_java", path = "/usr/share/bazel/rules/java")
    native.local_repository(name = "rules_proto", path = "/usr/share/bazel/rules/proto")
    _generated_repository(
        name = "rules_cc",
        files = {
            "BUILD": "",
            "cc/BUILD": "",
            "cc/defs.bzl": "".join(["{0} = native.{0}\n".format(rule) for rule in _CC_RULES]),
        },
    )
    _generated_repository(
        name = "remote_coverage_tools",
        files = {"BUILD": "filegroup(name = 'coverage_report_generator', visibility = ['//visibility:public'])"},
    )
