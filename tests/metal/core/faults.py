"""Mistakes planted into the Metal core, one at a time, and what finds each of them.

A mistake is a text of a source file that is replaced by another: it must be there exactly once. The
mistaken file is compiled and linked with the rest of the plain build, and the tests are run. A
mistake that no test finds fails the run.

    python -m tests.metal.core.faults K/N [MAC_WHEEL=...]

Every N-th of them, from the K-th on; what stands behind is make's, for the build.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.metal.parts import part_of

HERE = Path(__file__).parent
SOURCES = HERE.parents[2] / "metal_ext/csrc/core/metal"
BUILD = HERE.parents[2] / "build/metal/core"
TIMEOUT_S = 120
LIVES_PERCENT = 5


@dataclass(frozen=True)
class Fault:
    """rule: what it breaks. lives: found by random lives, not by the tests of single rules."""

    rule: str
    name: str
    file: str
    text: str
    becomes: str
    lives: bool = False


FAULTS = (
    Fault(
        "mapping observed",
        "a mapping is not waited for",
        "mapping_queue.cpp",
        "if (!wait_for_value(event_.get(), signalled_, health_.timeout()))",
        "if (false)",
    ),
    Fault(
        "mapping observed",
        "rows without memory may be used",
        "device_range.cpp",
        "if (start + count > mapped_tokens())",
        "if (false)",
    ),
    Fault(
        "mapping observed",
        "blocks count as mapped that are not",
        "sparse.cpp",
        "operations(MTL::SparseTextureMappingModeMap, run.heap_block, run.block, run.count)",
        "operations(MTL::SparseTextureMappingModeMap, run.heap_block, run.block, 1)",
        lives=True,
    ),
    Fault(
        "mapping observed",
        "a bundle is not waited for",
        "bundle.cpp",
        "  context_.mapping->finish();\n",
        "",
    ),
    Fault(
        "mapping observed",
        "the same, in random lives",
        "bundle.cpp",
        "  context_.mapping->finish();\n",
        "",
        lives=True,
    ),
    Fault(
        "mapping observed",
        "blocks of a bundle count as mapped before it is finished",
        "sparse.cpp",
        "    bundle.finish();\n  }\n  return false;\n",
        "    bundle.finish();\n  }\n  return !context()->maps_beside_steps;\n",
    ),
    Fault(
        "mapping observed",
        "every map of a bundle is waited for",
        "bundle.cpp",
        "    range->begin_map(run);\n",
        "    range->begin_map(run);\n    context_.mapping->finish();\n",
    ),
    Fault(
        "mapping observed",
        "of a bundle the first map alone is made",
        "bundle.cpp",
        "    range->begin_map(run);\n",
        "    if (&run == &maps.front().second) {\n      range->begin_map(run);\n    }\n",
        lives=True,
    ),
    Fault(
        "between steps",
        "whether a step is in flight is not asked",
        "context.cpp",
        "maps_beside_steps ? Epochs::Pause() : epochs.pause(what)",
        "(void)what, Epochs::Pause()",
    ),
    Fault(
        "between steps",
        "a block is unmapped that a step in flight reads elsewhere",
        "device_range.cpp",
        '  context_->mapping_point("blocks cannot be unmapped");\n}',
        "}",
    ),
    Fault(
        "between steps",
        "a step begins while blocks are unmapped",
        "device_range.cpp",
        '  const auto point = context_->mapping_point("blocks cannot be unmapped");\n',
        "",
    ),
    Fault(
        "between steps",
        "a map is begun behind a range that a step in flight uses",
        "device_range.cpp",
        '  const auto point = context_->mapping_point("blocks cannot be mapped");\n',
        "",
    ),
    Fault(
        "between steps",
        "a step begins before a bundle is finished",
        "bundle.cpp",
        '    point_ = context_.mapping_point("blocks cannot be mapped");\n',
        "",
    ),
    Fault(
        "between steps",
        "a step begins while a bundle is finished",
        "bundle.cpp",
        "  const Epochs::Pause point = std::move(point_);\n",
        "  point_.reset();\n",
    ),
    Fault(
        "between steps",
        "a step begins in a pause",
        "epochs.cpp",
        "  if (pauses_ > 0) {\n",
        "  if (false) {\n",
    ),
    Fault(
        "between steps",
        "a heap is released under a step that does not use it",
        "device_heap.cpp",
        '  const auto point = context_->mapping_point("a heap cannot be released");\n',
        "",
    ),
    Fault(
        "between steps",
        "what is mapped and unmapped at one point is not mapped first",
        "sparse.cpp",
        "bundle.has(*this)",
        "false",
    ),
    Fault(
        "step over before unmap",
        "an unmap waits for no step",
        "device_range.cpp",
        '  wait_for(last_used, "blocks are unmapped");\n',
        "  (void)last_used;\n",
    ),
    Fault(
        "step over before unmap",
        "the same, in random lives",
        "device_range.cpp",
        '  wait_for(last_used, "blocks are unmapped");\n',
        "  (void)last_used;\n",
        lives=True,
    ),
    Fault(
        "step over before unmap",
        "the last step is not noted",
        "device_range.cpp",
        "  last_used_ = std::max(last_used_, epoch);\n",
        "",
        lives=True,
    ),
    Fault(
        "step over before unmap",
        "only the first step is noted",
        "device_range.cpp",
        "  last_used_ = std::max(last_used_, epoch);\n",
        "  last_used_ = last_used_ > 0 ? last_used_ : epoch;\n",
    ),
    Fault(
        "step over before unmap",
        "a mapped block gets a second writer",
        "block_ledger.cpp",
        "if (blocks_[b].mappings > 0)",
        "if (false)",
    ),
    Fault(
        "only sealed is shared",
        "a block is shared under its writer",
        "block_ledger.cpp",
        "if (blocks_[b].written_epoch > completed_epoch)",
        "if (false)",
    ),
    Fault(
        "only sealed is shared",
        "writes are not noted",
        "device_range.cpp",
        "places_[b].heap->ledger().write(places_[b].block, this, epoch);",
        "",
    ),
    Fault(
        "only sealed is shared",
        "sharing seals nothing",
        "block_ledger.cpp",
        "    blocks_[b].sealed = true;\n",
        "",
    ),
    Fault(
        "only sealed is shared",
        "sealed blocks are written",
        "block_ledger.cpp",
        "if (blocks_[block].sealed)",
        "if (false)",
    ),
    Fault(
        "only sealed is shared",
        "a sharer may write, too",
        "block_ledger.cpp",
        "if (blocks_[block].writer != writer)",
        "if (false)",
    ),
    Fault(
        "only sealed is shared",
        "blank blocks are shared",
        "block_ledger.cpp",
        "if (blocks_[b].blank)",
        "if (false)",
    ),
    Fault(
        "zero at first",
        "nothing is filled",
        "bundle.cpp",
        "    context_.work->zero(zeros);\n",
        "",
    ),
    Fault(
        "zero at first",
        "of a bundle the first map alone is filled",
        "bundle.cpp",
        "    if (run.writable) {\n",
        "    if (run.writable && zeros.empty()) {\n",
        lives=True,
    ),
    Fault(
        "zero at first",
        "of a run only the first block is filled",
        "sparse.cpp",
        "arguments.bytes = run.count * bytes;",
        "arguments.bytes = bytes;",
        lives=True,
    ),
    Fault(
        "zero at first",
        "of several regions one is filled",
        "sparse.cpp",
        "    arguments.bytes = run.count * bytes;\n"
        '    arguments.regions = narrowed<uint32_t>("regions", alike.regions);\n',
        "    arguments.bytes = run.count * bytes;\n    arguments.regions = 1;\n",
    ),
    Fault(
        "zero at first",
        "the filling is not waited for",
        "block_work.cpp",
        "  wait(commands, name);\n",
        "",
        lives=True,
    ),
    Fault(
        "zero at first",
        "of an extent one region is filled",
        "paged.cpp",
        "std::memset(contents(region, run.block), 0, "
        "run.count * geometry().region_block_bytes(region));",
        "std::memset(contents(0, run.block), 0, run.count * geometry().region_block_bytes(0));",
    ),
    Fault(
        "heap idle and unmapped",
        "a mapped heap is released",
        "block_ledger.cpp",
        "  if (mappings_ > 0) {\n    throw",
        "  if (false) {\n    throw",
    ),
    Fault(
        "heap idle and unmapped",
        "a heap is released under steps",
        "device_heap.cpp",
        "if (!context_->epochs.wait(newest, context_->health.timeout()))",
        "if (unmake(), committed_ = 0; true) { return; } else",
    ),
    Fault(
        "heap idle and unmapped",
        "steps that began meanwhile are forgotten",
        "epochs.cpp",
        "if (completed_locked() == started_)",
        "if (true)",
        lives=True,
    ),
    Fault(
        "heap idle and unmapped",
        "a released heap stays in the residency set",
        "sparse.cpp",
        "  context()->residency.remove(heap_.get());\n",
        "",
    ),
    Fault(
        "objects are kept",
        "ranges are not kept",
        "substrate.cpp",
        "  ranges_.push_back(range);\n",
        "",
    ),
    Fault(
        "objects are kept",
        "heaps are not kept",
        "substrate.cpp",
        "  heaps_.push_back(heap);\n",
        "",
    ),
    Fault(
        "objects are kept",
        "released although the device is silent",
        "substrate.cpp",
        "  if (!ended) {\n",
        "  if (false) {\n",
    ),
    Fault(
        "the end in order",
        "the end does not wait for the last step",
        "substrate.cpp",
        "if (!context_->epochs.wait(newest, context_->health.timeout()))",
        "if (false)",
    ),
    Fault(
        "the end in order",
        "the end unmaps nothing",
        "substrate.cpp",
        "      range->unmap_all();\n",
        "",
    ),
    Fault(
        "the end in order",
        "the end unmaps what a bundle was to map",
        "substrate.cpp",
        "      context_->bundle->withdraw();\n",
        "",
    ),
    Fault(
        "the end in order",
        "the end goes on although the device is silent",
        "substrate.cpp",
        "  if (!quiesce()) {\n    return false;\n  }\n",
        "  quiesce();\n",
    ),
    Fault(
        "the end in order",
        "after the end things begin",
        "context.cpp",
        "  if (ended) {\n",
        "  if (false) {\n",
    ),
    Fault(
        "one signal per batch",
        "a signal behind the last batch alone",
        "mapping_queue.cpp",
        "  queue_->signalEvent(event_.get(), ++signalled_);\n",
        "  if (operations.size() == batch.size()) {\n"
        "    queue_->signalEvent(event_.get(), ++signalled_);\n  }\n",
    ),
    Fault(
        "one signal per batch",
        "a batch of any length",
        "mapping_queue.cpp",
        "operations.first(std::min(operations.size(), kMaxOperations))",
        "operations.first(operations.size())",
    ),
    Fault(
        "one signal per batch",
        "unmaps are not waited for",
        "mapping_queue.cpp",
        "    operations = issue(buffer, nullptr, operations);\n    wait();\n",
        "    operations = issue(buffer, nullptr, operations);\n",
        lives=True,
    ),
    Fault(
        "heap idle and unmapped",
        "a heap is released before its unmap was observed",
        "mapping_queue.cpp",
        "    operations = issue(buffer, nullptr, operations);\n    wait();\n",
        "    operations = issue(buffer, nullptr, operations);\n",
    ),
    Fault(
        "residency",
        "what is added is not committed",
        "resident_set.cpp",
        "  set_->commit();  // only what was committed counts\n",
        "",
    ),
    Fault(
        "residency",
        "residency of new memory is not requested",
        "residency.cpp",
        "      changed->requestResidency();  // this may take long\n",
        "",
    ),
    Fault(
        "residency",
        "new memory is touched before it has a set",
        "device_range.cpp",
        "    context_->settle();\n",
        "",
    ),
    Fault(
        "residency",
        "steps' queues do not get the sets",
        "residency.cpp",
        "    sets_[i].put_on(queue);\n",
        "",
    ),
    Fault(
        "residency",
        "the mapper's queues do not get the sets",
        "residency.cpp",
        "    put_on_own(sets_.back());\n",
        "",
    ),
    Fault(
        "residency",
        "sparse buffers are in no set",
        "sparse.cpp",
        "    this->context()->residency.add(buffer.get(), 0);\n",
        "    (void)buffer;\n",
    ),
    Fault(
        "sets stay as they are",
        "new memory joins a set that steps have",
        "residency.cpp",
        "  if (!open_) {\n    if (empty_",
        "  if (!open_ && (sets_.empty() || sets_.back().full)) {\n    if (empty_",
    ),
    Fault(
        "sets stay as they are",
        "the same, in random lives",
        "residency.cpp",
        "  if (!open_) {\n    if (empty_",
        "  if (!open_ && (sets_.empty() || sets_.back().full)) {\n    if (empty_",
        lives=True,
    ),
    Fault(
        "sets stay as they are",
        "a step leaves the newest set open",
        "residency.cpp",
        "    close();\n  }\n  refresh();\n",
        "  }\n  refresh();\n",
    ),
    Fault(
        "sets stay as they are",
        "sets are gathered under steps",
        "context.cpp",
        "!epochs.while_idle(health.timeout(), gather)",
        "(gather(), false)",
    ),
    Fault(
        "sets are few and small",
        "sets are never gathered",
        "context.cpp",
        "residency.crowded() && ",
        "false && ",
    ),
    Fault(
        "sets are few and small",
        "a set has any size",
        "residency.cpp",
        "sets_.size() < most ? set_bytes_ : ResidentSet::kAnySize",
        "ResidentSet::kAnySize",
    ),
    Fault(
        "sets are few and small",
        "weights take all sets",
        "residency.cpp",
        "  make_sets(most);\n",
        "  make_sets(options_.most_sets);\n",
    ),
    Fault(
        "asked for before use",
        "after a pause nothing is asked for",
        "residency.cpp",
        "    if (lapsed()) {\n      ask_for_all();\n",
        "    if (false) {\n      ask_for_all();\n",
    ),
    Fault(
        "asked for before use",
        "the same, in random lives",
        "residency.cpp",
        "    if (lapsed()) {\n      ask_for_all();\n",
        "    if (false) {\n      ask_for_all();\n",
        lives=True,
    ),
    Fault(
        "asked for before use",
        "everything is asked for at every step",
        "residency.cpp",
        "options_.now() - fresh_.load() > options_.interval;",
        "true;",
    ),
    Fault(
        "asked for before use",
        "a copy after a pause asks for nothing",
        "device_range.cpp",
        "  context_->residency.refresh();\n",
        "",
    ),
    Fault(
        "asked for before use",
        "what is left of a set is not asked for",
        "residency.cpp",
        "  found->set()->requestResidency();\n",
        "",
    ),
    Fault(
        "asked for while in use",
        "the heartbeat asks for nothing",
        "residency.cpp",
        "      if (health_.failure().empty()) {\n",
        "      if (false) {\n",
    ),
    Fault(
        "asked for while in use",
        "the heartbeat asks a device that has failed",
        "residency.cpp",
        "      if (health_.failure().empty()) {\n",
        "      {\n",
    ),
    Fault(
        "asked for while in use",
        "the heartbeat never ends",
        "heartbeat.cpp",
        "      keep_(keep),\n",
        "      keep_(1000 * keep),\n",
    ),
    Fault(
        "asked for while in use",
        "the heartbeat does not begin again",
        "heartbeat.cpp",
        "  if (sleeps_) {\n",
        "  if (false) {\n",
    ),
    Fault(
        "residency",
        "without sets nothing is named",
        "residency.cpp",
        "    unattached_.push_back(buffer);\n",
        "",
        lives=True,
    ),
    Fault(
        "pages, not bytes",
        "the buffer's range is in bytes",
        "sparse.cpp",
        "NS::Range((at.offset + block * bytes) / page, count * bytes / page)",
        "NS::Range(at.offset + block * bytes, count * bytes)",
    ),
    Fault(
        "pages, not bytes",
        "the heap's blocks lie as the range's do",
        "sparse.cpp",
        "shape.heap_region_offset(region) + heap_block * bytes",
        "shape.heap_region_offset(region) + block * bytes",
        lives=True,
    ),
    Fault(
        "epochs",
        "an abandoned step completes earlier ones",
        "epochs.cpp",
        "  while (abandoned_.erase(completed_ + 1) > 0) {\n    ++completed_;\n  }\n",
        "  if (!abandoned_.empty()) {\n"
        "    completed_ = std::max(completed_, *abandoned_.rbegin());\n  }\n",
    ),
    Fault(
        "copies",
        "a copy does not wait for the source's writer",
        "device_range.cpp",
        '  wait_for(last_used, "a block is copied");\n',
        "  (void)last_used;\n",
    ),
    Fault(
        "copies",
        "a copy takes the whole block",
        "sparse.cpp",
        "arguments.bytes = tokens * geometry().row_bytes(run.first_region);",
        "arguments.bytes = bytes;",
    ),
    Fault(
        "refusals change nothing",
        "a refused mapping stays in the books",
        "device_range.cpp",
        "    withdraw(run);\n",
        "",
    ),
    Fault(
        "cells and epochs",
        "a cell is written while a step may touch it",
        "cells.cpp",
        "    if (newest > completed) {",
        "    if (false) {",
    ),
    Fault(
        "cells and epochs",
        "a cell that is read may be taken by another sequence",
        "cells.cpp",
        "goes_on ? use.read : std::max(use.read, use.written)",
        "goes_on ? use.read : use.written",
    ),
    Fault(
        "cells and epochs",
        "who goes on in a cell does not ask for other readers",
        "cells.cpp",
        "goes_on ? use.read : std::max(use.read, use.written)",
        "goes_on ? 0 : std::max(use.read, use.written)",
    ),
    Fault(
        "cells and epochs",
        "a step does not go on in the cell of the step before",
        "cells.cpp",
        "const bool goes_on = segment.read == write.cell;",
        "const bool goes_on = false;",
    ),
    Fault(
        "cells and epochs",
        "a cell is written that others read in the same step",
        "cells.cpp",
        "reading->second > (goes_on ? 1 : 0)",
        "false",
    ),
    Fault(
        "cells and epochs",
        "two sequences write one cell",
        "cells.cpp",
        "if (!written.insert(write.cell).second)",
        "if (written.insert(write.cell), false)",
    ),
    Fault(
        "cells and epochs",
        "a cell is read that holds nothing",
        "cells.cpp",
        "if (segment.read && uses_[*segment.read].written == 0)",
        "if (false)",
    ),
    Fault(
        "cells and epochs",
        "a use is not remembered",
        "cells.cpp",
        "    uses_[cell].read = epoch;\n",
        "    (void)cell;\n",
    ),
    Fault(
        "cells and epochs",
        "a cell lies over the next one's beginning",
        "cells.cpp",
        "cell % cells_per_buffer_ * cell_bytes_",
        "cell % cells_per_buffer_ * (cell_bytes_ - 4096)",
    ),
    Fault(
        "cells and epochs",
        "cells are not made resident",
        "cells.cpp",
        "    context.residency.add(buffer.get(), buffer->length());\n",
        "    (void)buffer;\n",
    ),
    Fault(
        "cells and epochs",
        "cells have no set when the first step begins",
        "substrate.cpp",
        "  context_->settle();\n",
        "",
    ),
    Fault(
        "the end in order",
        "cells go while steps run",
        "substrate.cpp",
        "  if (!quiesce()) {",
        "  if (cells_ != nullptr) {\n    cells_->drop();\n  }\n  if (!quiesce()) {",
    ),
    Fault(
        "failures are for good",
        "a failure is forgotten",
        "health.cpp",
        "  if (!failure_.empty()) {\n    throw",
        "  if (false) {\n    throw",
    ),
    Fault(
        "failures are for good",
        "a failed command is taken for a slow one",
        "block_work.cpp",
        "if (commands->status() == MTL::CommandBufferStatusError)",
        "if (false)",
    ),
    Fault(
        "asked, not assumed",
        "the device's own word is not heard",
        "capabilities.cpp",
        "if (found_.placement_sparse == false)",
        "if (false)",
    ),
)


def plant(fault: Fault, number: int) -> Path:
    """Writes the mistaken file into a folder of its own; the folder."""
    text = (SOURCES / fault.file).read_text()
    if text.count(fault.text) != 1:
        raise SystemExit(
            f"{fault.file} has {text.count(fault.text)} times, not once, the text of the mistake "
            f"{fault.name!r}: tests/metal/core/faults.py must follow the source"
        )
    folder = BUILD / f"faults/{number}"
    folder.mkdir(parents=True, exist_ok=True)
    mistaken = text.replace(fault.text, fault.becomes)
    path = folder / fault.file
    if not path.exists() or path.read_text() != mistaken:
        path.write_text(mistaken)
    return folder


def run(folder: Path, fault: Fault) -> str:
    """Runs the tests on a mistake; what found it, or nothing."""
    lives = LIVES_PERCENT if fault.lives else 0
    try:
        done = subprocess.run(
            [folder / "tests", "engines live" if fault.lives else "", "until one fails"],
            env={**os.environ, "SEEDS": str(lives)},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "never ends"
    failed = [line[17:] for line in done.stdout.splitlines() if line.startswith("FAILED")]
    if failed:
        return failed[0]
    words = done.stderr.splitlines() or [f"the process ends with {done.returncode}"]
    return "" if done.returncode == 0 else words[-1]


def find(fault: Fault) -> str:
    folder = plant(fault, FAULTS.index(fault))
    # One make for each, beside the one that may have started this.
    environment = {key: value for key, value in os.environ.items() if "MAKE" not in key}
    subprocess.run(
        ["make", *sys.argv[2:], "faulty", f"FOLDER={folder}", f"FILE={fault.file}"],
        cwd=HERE,
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return run(folder, fault)


def main() -> int:
    missed = 0
    planted = part_of(FAULTS, sys.argv[1])
    print(f"{'rule':24} {'mistake':45} found by")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for fault, by in zip(planted, pool.map(find, planted), strict=True):
            print(f"{fault.rule:24} {fault.name:45} {by or 'NOBODY'}", flush=True)
            missed += not by
    rules = len({fault.rule for fault in planted})
    summary = (
        f"{len(planted)} of {len(FAULTS)} mistakes, in {rules} rules planted, {missed} not found"
    )
    (BUILD / "faults.log").write_text(summary + "\n")
    print(summary)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
