"""Publishes the ledger's settled figures as Apache Iceberg tables, and answers the ledger's queries from them."""
