// Package dst is the seeded simulation of the whole library: its tests run random
// programs over publish on the simulated driver, with random faults, on one
// goroutine, so that a seed repeats exactly. There is nothing here but tests.
// docs/simulation.md tells what they found and what they catch.
package dst
