-- Stores the present facts of nodes. incoming: cluster, name, content.
MERGE INTO node USING incoming i ON node.cluster = i.cluster AND node.name = i.name
WHEN MATCHED THEN UPDATE SET content = i.content
WHEN NOT MATCHED THEN INSERT VALUES (i.cluster, i.name, i.content)
