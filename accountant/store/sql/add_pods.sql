-- Into {table}: pods that have no row.
INSERT INTO {table}
SELECT * FROM incoming i WHERE NOT EXISTS (SELECT 1 FROM {table} p WHERE p.cluster = i.cluster AND p.uid = i.uid)
