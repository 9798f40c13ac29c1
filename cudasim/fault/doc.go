// Package fault makes driver calls fail, wait or lose the context, as a line of
// text says. It wraps any [driver.Driver], the machine's or a simulated one, so
// that a test sees what a program does when its i-th driver call fails.
//
//	inj, err := fault.Wrap(drv, fault.Plan{}) // nothing fails yet
//	drv = inj.Driver()                        // what the program under test uses
//	...
//	plan, err := fault.Parse("fail cuMemcpyDtoHAsync #2 with CUDA_ERROR_ILLEGAL_ADDRESS after")
//	err = inj.Arm(plan) // calls are counted from here
//	...
//	inj.Disarm()
//	fmt.Println(inj.Injected())
//
// [Each] fails every call of a workflow, one at a time, and fails itself where
// it did not.
//
// # Plans
//
// A [Plan] is made by [Rules], [Sequence] and [FirstOf], or by [Parse] from the
// one line that its String gives:
//
//	plan  = "nothing" | chain { ";" chain }
//	chain = rule { "then" rule }
//	rule  = "fail" cond [ "#" range ] "with" code [ "after" ] [ "at" gate ]
//	      | "lose" cond [ "#" range ] "with" code [ "after" ] [ "at" gate ]
//	      | "delay" cond [ "#" range ]            [ "after" ] "at" gate
//	cond  = "any" | name | "call" range | "func" label | "not" cond
//	      | "(" cond { "and" cond } { "or" cond { "and" cond } } ")"
//	range = 3 | 3..5 | 3..
//
// What follows a rule's range may stand in any order, "before" for the default
// too, and a code may be a number. Space, or its lack beside "(", ")", ";" and
// "#", means nothing.
//
//	fail call 7 with 700                       the 7th call of all, from Arm on
//	fail cuEventRecord #2 with 1               the 2nd cuEventRecord
//	fail cuEventRecord #2..4 with 1            three of them
//	fail cuEventRecord #2.. with 1             the 2nd and all that follow
//	fail cuEventRecord with 1                  every one
//	fail cuEventRecord with 1 after            the call is made, then its result is replaced
//	fail (cuEventRecord or cuEventQuery) #3 with 1
//	fail (not cuEventQuery and call 9..) with 1
//	delay cuEventRecord #1 at g                waits before the call until the test opens g
//	delay cuEventRecord #1 after at g          waits behind the call
//	fail cuEventRecord #1 with 1 at g          waits, then fails
//	lose cuEventSynchronize #1 with 719        this call, and every later one on the context, fails
//	fail cuEventQuery #1 with 600 then fail cuEventRecord #1 with 1
//	fail call 7 with 700; delay any at g       the first rule that matches wins
//
// A name is an entry point's name in C. Without its version it means each
// version: cuMemcpyDtoHAsync is cuMemcpyDtoHAsync_v2 as well. A name that
// purecuda does not know is an error. "call 7" is a position among all calls
// since [Injector.Arm], "#7" one among the calls that the condition matches;
// both count from 1. Rules count what they match also where an earlier one
// wins, or the context is lost. In a chain the next rule begins to count when the one before it is
// through, which therefore needs a range that ends; positions go on. A rule of
// "func" is a Go function, see [Func]: it prints, and is no text to parse.
//
// # What is injected, and where
//
// A list of calls, which purecuda hands to a driver as one, is executed call by
// call, and each may fail. "before" is without effect: the driver never hears
// of the call. "after" makes the call and replaces its result, whatever that
// was.
//
// cuGetErrorName and cuGetErrorString are never injected and never counted:
// they only tell about errors.
//
// # A lost context
//
// From "lose" on, every call that touches a context returns the code, as on
// hardware (docs/driver-facts.md, "a kernel that stores to address 16"), also
// those that wait for work meanwhile, once their wait ends. These go on to
// work, as on the simulator: cuInit, the calls that only tell about the driver,
// its errors and devices, cuPointerGetAttribute, those about primary contexts, of
// which cuDevicePrimaryCtxRelease returns 0, the thread's current context and
// capture mode, those about memory pools that allocate nothing, and cuGraphDestroy. Nothing brings the context back:
// the loss outlives [Injector.Disarm] and the next Arm. An Injector does not
// tell the contexts of several devices apart: all are lost.
//
// The driver beneath does not know of it. What the program rightly no longer
// frees is left there, so that a simulator's Close reports it; its Violations
// are what to look at after a loss.
package fault
