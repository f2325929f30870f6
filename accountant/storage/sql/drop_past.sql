-- Removes earlier facts of nodes and namespaces. incoming: kind, cluster, name.
DELETE FROM past USING incoming i WHERE past.kind = i.kind AND past.cluster = i.cluster AND past.name = i.name
