"""``parallax export``: a checkpoint of a run in the formats of other libraries, one module each.

=============  ==========================================================================================
huggingface    a folder of transformers, with tokenizer; unmerged adapters are in peft's format
safetensors    the weights alone, under the model's own names
dcp            torch's distributed checkpoint format: weights and optimizer states, by the model's names
peft           the adapters alone
=============  ==========================================================================================
"""

from parallax.run.export.adapters import PeftForm
from parallax.run.export.choice import CheckpointChoice
from parallax.run.export.distributed import DistributedForm
from parallax.run.export.exporting import export
from parallax.run.export.form import Exported, ExportForm
from parallax.run.export.huggingface import HuggingFaceForm
from parallax.run.export.plain import SafetensorsForm

FORMS: dict[str, ExportForm] = {
    form.name: form
    for form in (HuggingFaceForm(), SafetensorsForm(), DistributedForm(), PeftForm())
}

__all__ = ["FORMS", "CheckpointChoice", "ExportForm", "Exported", "export"]
