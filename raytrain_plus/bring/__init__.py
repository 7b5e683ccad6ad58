"""Train code that was written elsewhere: models of Hugging Face, without a task of your own.

task: raytrain_plus.bring:Model
args: {folder: models/minilm, head: SequenceClassification}
"""

from raytrain_plus.bring.model_task import Model

__all__ = ["Model"]
