-- The user of each holder, from the newest report that names one: Slurm's user, or the pod's own label
-- (accountant.ledger.team_assignment.USER_KEY). incoming: id.
SELECT id, arg_max(who, (observed_ms, who))
FROM (
    SELECT i.id, s.observed_ms,
           coalesce(json_extract_string(s.content, '$.labels."slurm/user"'),
                    json_extract_string(s.content, '$.labels."gputally.dev/user"')) AS who
    FROM incoming i JOIN holder h ON h.id = i.id JOIN pod_seen s ON s.cluster = h.cluster AND s.uid = h.uid
    UNION ALL
    SELECT i.id, p.observed_ms, json_extract_string(p.content, '$.labels."gputally.dev/user"')
    FROM incoming i JOIN holder h ON h.id = i.id JOIN pod p ON p.cluster = h.cluster AND p.uid = h.uid
)
WHERE who IS NOT NULL
GROUP BY id
