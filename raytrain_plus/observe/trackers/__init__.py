"""Listeners of a run: TensorBoard, MLflow, Weights & Biases and a task's callbacks, fed and never waited for."""
