-- Adds tenures of GPUs on nodes.
INSERT INTO tenure SELECT unnest($gpus), unnest($nodes), unnest($firsts), unnest($lasts), unnest($imported)
