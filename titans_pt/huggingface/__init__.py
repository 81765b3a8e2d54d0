"""Runs as Hugging Face folders and back, bit for bit; importing this registers the model with AutoModelForCausalLM.

    import titans_pt.huggingface
    model = AutoModelForCausalLM.from_pretrained(FOLDER)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model.generate(**tokenizer("text", return_tensors="pt"), max_new_tokens=20)

Without this package, ``trust_remote_code=True`` runs the source files that every exported folder carries (source.py).
generate() carries the memory's state: every token is read once, at any length. To continue after a call, pass its
``state``: ``model.generate(new_ids, state=out.state)``. docs/export.md lists what else works.
"""

from titans_pt.errors import UserError

try:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
except ImportError as error:
    raise UserError(f"transformers: cannot be imported ({error}); install it: pip install 'titans-pt[eval]'") from None

from titans_pt.huggingface.export import export_run, import_run
from titans_pt.huggingface.modeling import TitansConfig, TitansForCausalLM, TitansOutput, TitansTokenizer
from titans_pt.huggingface.source import source_files

__all__ = ["TitansConfig", "TitansForCausalLM", "TitansOutput", "TitansTokenizer", "export_run", "import_run"]

TitansConfig.source_files = staticmethod(source_files)
AutoConfig.register(TitansConfig.model_type, TitansConfig)
AutoModelForCausalLM.register(TitansConfig, TitansForCausalLM)
AutoTokenizer.register(TitansConfig, slow_tokenizer_class=TitansTokenizer)
