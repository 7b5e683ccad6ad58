"""What is not Parquet, converted into Parquet once per node."""
