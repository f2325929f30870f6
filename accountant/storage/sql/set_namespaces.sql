-- Stores the present facts of namespaces. incoming: cluster, name, content.
MERGE INTO namespace USING incoming i ON namespace.cluster = i.cluster AND namespace.name = i.name
WHEN MATCHED THEN UPDATE SET content = i.content
WHEN NOT MATCHED THEN INSERT VALUES (i.cluster, i.name, i.content)
