"""Publishes the ledger's settled figures as Apache Iceberg tables, and answers the ledger's queries from them.

Read in this order: `tables`, what is published; `table_rows`, how a day and a month become rows; `publisher`, when they
are written; `lake_ledger`, a moment that is answered from them; `engines`, what runs its queries."""
