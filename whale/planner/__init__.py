"""The planner: searches for the fastest parallel strategy of a model on unequal devices. It does not import TensorFlow.

    cluster file -------------------> Machines (pools: equal devices on equal hosts)       cost_model.cluster
    description or measured layers -> Model (a chain of layers with seconds and bytes)     cost_model.analytic
    both, batch, constraints -------> search: estimate, cut into stages, simulate          analytic_search
    -> SearchResult -> PlanFile (JSON), which reports, drawings and the command line read  report

`ask.plan` is the entry point; docs/guides/planner.md explains how to use it. Without a search,
`cost_model.analytic.evaluate` computes the cost of a given strategy, and `analytic_search.plan_check.check` validates
it. `graph_search` searches strategies for captured programs instead of described models.
"""
