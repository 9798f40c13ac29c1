// Package drivertest is the conformance suite of a CUDA driver: the same cases
// run on the simulator and on a GPU, so that what the simulator does and what
// this library expects is what hardware was seen to do.
//
// Each case names the evidence that it rests on. A difference between the
// simulator and hardware is a bug of the simulator; a difference between
// hardware and a case is news for docs/driver-facts.md.
//
// No case depends on time: streams are held by a flag (internal/hold), and a
// call that must block is let go afterwards. Deadlines only fail.
package drivertest

import (
	"slices"
	"strings"
	"testing"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/child"
)

// A Target is a driver to be tested, with at least one device.
type Target struct {
	Driver *driver.Driver
	// Blocked returns how many callers are inside a call that blocks, or is
	// nil where nobody can tell.
	Blocked func() int
	// Done, if not nil, ends the target and returns what was wrong with the
	// use of it. misuse tells that the case misuses the driver on purpose,
	// which must have been noticed.
	Done func(misuse bool) error
}

// A Case is one expectation of the driver.
type Case struct {
	Name string
	// Evidence is what the expectation rests on: "section: words" is a place
	// in docs/driver-facts.md; "evidence: file" a run of this suite on
	// hardware, in docs/evidence; "design: words" a promise of this library;
	// "unverified: words" what the driver's reference says, or nothing: the
	// name of such a case ends so where it runs. A test of internal/archtest looks
	// them up.
	Evidence string
	// Child cases run in a process of their own: they end their context, or
	// would leave a thread stuck where they fail.
	Child bool
	// Env is the environment of a Child case besides the parent's.
	Env []string
	// Misuse cases do what programs must not.
	Misuse bool

	run func(*rig)
}

// Cases returns all cases.
func Cases() []Case {
	return slices.Concat(basicCases, orderCases, memoryCases, moduleCases, stallCases, blockCases, captureCases, besideCases, lostCases, publishCases)
}

// onHardware is the run that the cases rest on which no measurement before
// covered.
const onHardware = "evidence: 2026-12-01-h200.md"

// Run runs every case as a subtest, each on a target of its own.
func Run(t *testing.T, open func(t *testing.T) Target) {
	for _, c := range Cases() {
		name := c.Name
		if strings.HasPrefix(c.Evidence, "unverified") {
			name += "_UNVERIFIED" // on hardware: nobody shall take it for more
		}
		t.Run(name, func(t *testing.T) {
			if c.Child && !child.Is() {
				child.Run(t, c.Env...)
				return
			}
			c.run(newRig(t, open(t), c.Misuse))
		})
	}
}
