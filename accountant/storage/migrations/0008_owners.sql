-- Which node each GPU belonged to, from when on: until the next row of that GPU. at_ms: the accountant's clock then.
-- who: who confirmed the move; '' where records alone showed it.
CREATE TABLE gpu_owner (
    cluster VARCHAR NOT NULL, gpu_uuid VARCHAR NOT NULL, node VARCHAR NOT NULL, from_ms BIGINT NOT NULL,
    at_ms BIGINT NOT NULL, who VARCHAR NOT NULL
);

-- Which node first named a pod, in a row or else in a fact: what it tells counts for the pod, no other node's word.
CREATE TABLE pod_node (cluster VARCHAR NOT NULL, uid VARCHAR NOT NULL, node VARCHAR NOT NULL, by_row BOOLEAN NOT NULL);
INSERT INTO pod_node
SELECT cluster, uid, content ->> '$.node', true FROM pod WHERE coalesce(content ->> '$.node', '') != '';
