-- Stores the present facts of nodes or namespaces. Rows are replaced and not updated (accountant.storage.transactions).
-- {table}: node or namespace. incoming: cluster, name, content.
DELETE FROM {table} USING incoming i WHERE {table}.cluster = i.cluster AND {table}.name = i.name;
INSERT INTO {table} FROM incoming
