"""Define the settings of a job's `data`, with their meanings, defaults and types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from raytrain_plus.job import bounds
from raytrain_plus.job.sameness import FREE, KEPT
from raytrain_plus.job.setting_types import Format


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """Which rows to train on, and how to shuffle, batch and transform them."""

    path: Annotated[str | None, bounds.address, KEPT] = None
    """File, folder (searched recursively) or pattern, with the training rows; see `format`. Give exactly one of `path`,
    `dataset` and `mix`.

    In a pattern, `*`, `?` and `[...]` match within one name and `**` matches any number of folders:
    `data/*.parquet`, `data/2024-*/part-*.parquet`, `data/**/*.parquet`. The files that match, sorted by name, are one
    dataset. Names that begin with . or _ are ignored, and links are followed: those that lead to a file of the data
    itself, in a circle or to nothing are an error. Relative paths start at the working directory.

    An address such as `s3://bucket/rows/*.parquet?region=eu-west-1` names files in remote storage, with the schemes and
    settings of `storage`. Parquet is read there, one row group at a time; other formats are copied to each node first.
    """

    format: Annotated[Format | None, FREE] = None
    """`parquet`, `jsonl`, `csv` (also TSV), `arrow` (also Feather), `text` (a row for each line), `huggingface` (a
    folder that `save_to_disk` wrote, or Parquet files of one split, as on the hub), `images` (a folder of image files),
    `webdataset` (tar files of samples) or `lance` (the newest version of a Lance dataset, a folder; needs the extra
    `lance` of this package), or with `windows` the type of the numbers in a file that holds nothing else: `uint8`,
    `uint16`, `uint32`, `int16`, `int32`, `int64`. Default None: what the names of the files say.

    Other formats than Parquet are converted once on each node, in ~/.cache/raytrain_plus/data; `.gz`, `.bz2` and
    `.zst` are uncompressed. Changed files are converted again. The environment variable RAYTRAIN_CACHE of a machine
    names another folder for that, as XDG_CACHE_HOME does; without a home that can be written to, it is a temporary one.
    """

    dataset: Annotated[str | None, bounds.import_path, KEPT] = None
    """`module:function` that returns a dataset, in place of `path`. It is called without arguments, in every process
    that reads.

    A `torch.utils.data.Dataset` or a `datasets.Dataset` is read by index, and its items must be the same whenever they
    are read. An `IterableDataset` is read once on each node, and kept in ~/.cache/raytrain_plus/data; so is a
    `ray.data.Dataset`, on the driver's machine alone. Items that are mappings give batches that are mappings, tuples
    give tuples, and single values tensors.
    """

    mix: Annotated[Sequence[Mapping[str, Any]] | None, bounds.mix, KEPT] = None
    """2 to 16 sources in fixed proportions, in place of `path`: a list of `{path: ..., weight: ...}`. Each may have a
    `format`, and `dataset` in place of `path`.

    Each shard takes rows in proportion to the weights, to within a few rows in any step. Each source has epochs of its
    own, in which each of its rows is used once. All must have the same columns. Needs `steps`.
    """

    columns: Annotated[Sequence[str] | Mapping[str, str] | None, bounds.columns, KEPT] = None
    """The columns to read: a list of names, or `{name: type}`, such as `{text: string, label: int64, x: float32}`, with
    types as Arrow names them. Default None: all, as they are stored.

    What is not named is not read. Fractions of JSON Lines and CSV become float32, unless a type is given here. Applies
    to `evaluate.path` and each source of a `mix` too.
    """

    image_size: Annotated[Sequence[int] | None, bounds.image_size, KEPT] = None
    """`[height, width]` in pixels, to which every column of encoded images is decoded and resized, as RGB, before
    `transform`. Default None: images stay encoded.

    A column becomes a tensor of shape (rows, 3, height, width), of uint8. Pixels are interpolated bilinearly; an EXIF
    orientation is not applied. Needs Pillow, which the extra `images` of this package installs.
    """

    prepare: Annotated[str | None, bounds.import_path, FREE] = None
    """`module:function` that writes the data if `path` is missing. Default None: the data must exist.

    `path` cannot be a pattern then. The function is called once per node as function(folder, name) and must write the
    same bytes on every node. `folder` is an empty folder that becomes `path`; `name` is the last part of `path`.
    """

    batch_size: Annotated[int, bounds.at_least(1), KEPT]
    """Rows in the global batch of one step. Must be a multiple of `shards`. Required."""

    shards: Annotated[int, bounds.at_least(1, 100_000), KEPT] = 8
    """Logical shares of every global batch, fixed for the job's life; limits how many workers are useful. Default 8. A
    worker computes its shards one after the other: with GPUs, as many as the largest group has workers are best."""

    shuffle: Annotated[Literal["none", "units", "rows"], KEPT] = "rows"
    """What each epoch shuffles: `none`: nothing; `units`: the order of row groups; `rows` (the default): also the rows
    inside each group. A dataset that is read by index, and `windows`, are permuted as a whole first, unless it is
    `none`; then blocks of them are what row groups are."""

    group_by_length: Annotated[str | None, KEPT] = None
    """Name of a column of `dataset` by which rows of similar length are used together, so that less of a batch is
    padding: of lists and text their length counts, of whole numbers the number. Default None: rows of any length.

    Rows are sorted within windows of 50 global batches, and cut into blocks of 8 microbatches; each epoch shuffles the
    blocks, and the rows in each. All items are read once before the run begins. Not with `mix`, `pack` or `shuffle:
    none`.
    """

    transform: Annotated[str | None, bounds.import_path, KEPT] = None
    """`module:function(table, rng)` applied to blocks of at most `granule` rows before batching.

    Default None: rows are used as they are. The function must keep the number of rows, and be safe to call from two
    threads or two processes at once. `rng` is a NumPy generator for each block. One that draws from the generators of
    Python, NumPy or torch instead, as torchvision's transforms do, gets the same numbers on any worker too: it is
    called in tasks of Ray, where these are seeded for each block.
    """

    collate: Annotated[str | None, bounds.collate_function, KEPT] = None
    """How rows become a batch: `stack`, `pad`, `pack` or `module:function(table)`. Default None: the task's `collate`.

    `stack` makes a tensor of each column, as a task does that has no `collate`. `pad` also takes text, as a list, and
    lists of different lengths, which it fills up to the longest of the microbatch, with 0, or -100 in `labels`;
    `attention_mask` says where values are. `pack` joins the lists of a microbatch into one sequence, (1, tokens), and
    adds `position_ids` and `cu_seq_lens`, where each row begins; means are then weighted by tokens, not by rows.
    """

    tokenizer: Annotated[str | None, KEPT] = None
    """Folder with a `tokenizer.json`, as Hugging Face's `save_pretrained` writes it, or the file. Default None.

    The text in the rows that come out of `transform` becomes lists of token numbers: the only column of text becomes
    `input_ids`, each of several `<column>_input_ids`. Special tokens and truncation are as the file says; `collate`
    pads. With `pack` tokens are made before, once. Needs the extra `transformers` of this package.
    """

    pack: Annotated[int | None, bounds.at_least(2, bounds.MOST_TOKENS), KEPT] = None
    """Tokens of a row, at least 2: documents are packed into rows of exactly this length, once on each node. Default
    None: rows are as they are.

    The only column of text (`tokenizer` makes its tokens) or of lists of token numbers is joined in the order of the
    data; other columns are left out. Each document ends with the `eos_token` of the tokenizer's
    `tokenizer_config.json`, if there is one, and is not truncated. Rows have the columns `input_ids` and
    `position_ids`, which begins at 0 in each document; the last tokens, which fill no row, are dropped. The rows of
    `evaluate` are packed too. `transform` gets packed rows, which are kept in ~/.cache/raytrain_plus/data.
    """

    windows: Annotated[int | None, bounds.at_least(1, bounds.MOST_TOKENS), KEPT] = None
    """Tokens of a window: rows are the windows of one long stream of token numbers, as language models are trained on.
    Default None: rows are as they are.

    `path` names files of this machine that are such a stream: `.npy` of one dimension, or numbers alone, whose type
    `format` says: `uint16` for those that nanoGPT's `prepare.py` writes. They are mapped into memory, and nothing is
    converted. Or it names documents, as for `pack`, which are joined to a stream once on each node, each with its end
    token. A row has two lists of numbers: `input_ids`, the tokens i to i + windows of the stream, and `targets`, the
    same one token later. Every window is used once an epoch; unless `shuffle` is `none`, they are permuted over the
    whole stream. Applies to `evaluate.path` and each source of a `mix` too.
    """

    stride: Annotated[int, bounds.at_least(1, bounds.MOST_TOKENS), KEPT] = 1
    """Tokens between the beginnings of two `windows`. Default 1: every window; the same as `windows`: disjoint ones."""

    on_error: Annotated[Literal["stop", "skip"], KEPT] = "stop"
    """What to do with a row that `image_size`, `transform` or `tokenizer` cannot use.

    `stop` (the default) ends the run and names file and row. `skip` leaves out a row that fails in two reads: it has
    no part in the loss, the gradient and the counts that they are divided by, and steps keep their places in the
    data. Errors of the storage are never skipped. Where `transform` raises for a block, it is called for each of its
    rows alone, with the same generator, then for the block without those that fail. `evaluate` leaves such rows out
    too, and files of `format: images` that are no images. Needs `parallel.pipeline` 1.
    """

    granule: Annotated[int, bounds.at_least(1), KEPT] = 1024
    """Transform block: the largest number of rows that `transform` gets in one call. Default 1024."""

    cache_mb: Annotated[int, bounds.at_least(0), FREE] = 256
    """Megabytes of decoded row groups that a worker may keep in memory from one epoch to the next.

    Default 256; 0 disables the cache. Row groups are kept only if the whole dataset fits, without `transform` and
    `image_size`, and without `tokenizer` unless `pack` is given.
    """
