"""What is made of the values of rows: tokens, images, columns, batches."""
