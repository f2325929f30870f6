-- The node that each GPU belongs to from from_ms until the next row of the GPU. at_ms: when the accountant stored the row.
-- who: the administrator who confirmed the move; '' if records showed it.
CREATE TABLE gpu_owner (
    cluster VARCHAR NOT NULL, gpu_uuid VARCHAR NOT NULL, node VARCHAR NOT NULL, from_ms BIGINT NOT NULL,
    at_ms BIGINT NOT NULL, who VARCHAR NOT NULL
);

-- The node that first named a pod, in a row or in a fact. Only the records of this node count for the pod.
CREATE TABLE pod_node (cluster VARCHAR NOT NULL, uid VARCHAR NOT NULL, node VARCHAR NOT NULL, by_row BOOLEAN NOT NULL);
INSERT INTO pod_node
SELECT cluster, uid, content ->> '$.node', true FROM pod WHERE coalesce(content ->> '$.node', '') != '';
