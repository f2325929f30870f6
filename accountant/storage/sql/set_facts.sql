-- Stores the present facts of nodes or namespaces. {table}: node or namespace. incoming: cluster, name, content.
MERGE INTO {table} USING incoming i ON {table}.cluster = i.cluster AND {table}.name = i.name
WHEN MATCHED THEN UPDATE SET content = i.content
WHEN NOT MATCHED THEN INSERT VALUES (i.cluster, i.name, i.content)
