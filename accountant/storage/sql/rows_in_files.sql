-- The rows in the files of parts. A measure is null in the rows of parts from before it. {files}: SQL for a list of files.
SELECT * FROM read_parquet({files}, union_by_name = true) UNION ALL BY NAME SELECT {nulls_of_measures} WHERE false
