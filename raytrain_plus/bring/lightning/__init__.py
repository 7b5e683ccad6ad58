"""Train a LightningModule: with `Trainer` in a script, or in a job file.

task: raytrain_plus.bring.lightning:Module
args: {module: "digits:Digits", hparams: {width: 64}}
"""

from raytrain_plus.bring.lightning.lightning_task import NamedModule as Module
from raytrain_plus.bring.lightning.lightning_trainer import LightningTrainer as Trainer

__all__ = ["Module", "Trainer"]
