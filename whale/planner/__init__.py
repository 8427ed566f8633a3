"""The planner: finds how a model is best spread over unequal devices. No TensorFlow.

    a cluster file ----------------> Machines (pools: equal devices of equal hosts, their groups)
    description or measured tables -> Model (tables: a chain of layers with seconds and bytes)
    both, batch, limits -----------> search: estimate -> cut -> simulate; exact for few devices
    -> Found -> PlanFile (JSON), which show, draw and the command's verbs read

`ask.plan` is the way in; docs/guides/planner.md explains. `evaluate` computes what a spread costs and `evaluate.check`
whether it is one at all, both without the search.
"""
