"""Clients that behave badly, threats and faults, and what becomes of them.

A test that holds against one of these is named after its number, wherever it stands:
``test_threat_05_...``, ``test_fault_07_...``. ARCHITECTURE.md says which hold what is promised.

Threats:

  1 listening to the world; 2 DNS rebinding; 3 a web page asks; 4 a way around the key; 5 slow
  headers, slow bodies, idle sockets; 6 a huge head; 7 a huge body; 8 hostile JSON; 9 a prompt too
  large; 10 the tokenizer stalls the loop; 11 too many requests; 12 a slow reader; 13 a client
  leaves; 14 endless generation; 15 timing tells what others asked; 16 old K and V in recycled
  pages; 17 logs and metrics that tell contents; 19 code that comes with a model, or from the
  network; 20 memory errors in native code; 21 a whole machine out of memory; 22 smuggled requests
  and forwarded headers.

Faults:

  1 a prompt that can never fit; 2 no pages at decode; 3 no pages at admission; 4 a reservation
  fails half-way; 5 a client disconnects, in any phase; 6 an abort races with an end; 7 logits
  that are not finite; 8 MLX raises in a step; 9 a Metal command buffer fails; 10 the device
  hangs; 11 the engine's thread dies; 12 an assertion fails; 13 the tokenizer fails; 14 a
  character cut between tokens; 15 a stop string across tokens; 16 damaged weights or settings of
  a model; 17 no space on disk; 18 a crash while a prefix is written to disk; 21 SIGTERM under
  load; 22 SIGKILL, power; 23 the wall clock jumps; 24 1000 connections; 25 the system runs out of
  memory; 26 a request id twice, a flood of messages; 27 /metrics under load.
"""
