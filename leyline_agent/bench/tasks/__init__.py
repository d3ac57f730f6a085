"""Table 3: whether a policy helps an agent to solve debugging tasks, and what that costs.

A task is a folder (`task`), tried in a throw-away copy of it (`workspace`) whose commands run cut off from everything
else (`sandbox`). An agent with five tools (`tools`) works on it (`agent`), for every policy and seed (`run`).
"""
