"""The names of small files that an artifact carries for its model beside config.json, and that are handed on to
transformers and to exports. A file of another name stays where it is: transformers has uses of its own for some."""

TOKENS = "added_tokens.json"
# Of what turns images and sound into inputs.
PROCESSORS = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
SETTINGS = (
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    TOKENS,
    *PROCESSORS,
)
# With those of one kind of tokenizer alone: DeBERTa's, RemBERT's, Marian's, SpeechT5's, PhoBERT's, FSMT's, LUKE's,
# BARTpho's, RoCBert's, MyT5's, GPT-NeoX-Japanese's, Whisper's.
CONTENT = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "spm.model",
    "sentencepiece.model",
    "source.spm",
    "target.spm",
    "target_vocab.json",
    "spm_char.model",
    "bpe.codes",
    "vocab-src.json",
    "vocab-tgt.json",
    "prophetnet.tokenizer",
    "entity_vocab.json",
    "dict.txt",
    "word_shape.json",
    "word_pronunciation.json",
    "byte_maps.json",
    "emoji.json",
    "normalizer.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "chat_template.jinja",
    "chat_template.json",
    "tekken.json",
)
HANDED_ON = frozenset(("config.json", *SETTINGS, *CONTENT))
