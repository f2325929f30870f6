"""Serves the HTTP API under `/v1`.

Read in this order: `dependencies`, what routes need; `access_control`, who may ask; `query_parameters`, what may be
asked; `usage_cost_and_job_routes`, the longest example of routes; `answer_cache`, which keeps their answers."""
