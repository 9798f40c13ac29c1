package dst

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"time"
)

// A mutation is the library with one thing broken, that the simulation must find.
type mutation struct {
	name string // what is broken
	law  string // the law of the design that it breaks
	file string
	old  string // occurs once
	new  string
}

var mutations = []mutation{
	{"memory freed before its fence", "1 no free in flight", "publish/record.go",
		"	case known:\n		r.releaseNow()\n		return\n", "	case known || true:\n		r.releaseNow()\n		return\n"},
	{"a closed publication freed at once", "1 no free in flight", "publish/record.go",
		"	} else if done {\n		r.releaseNow()", "	} else if done || r.transfer.State() == own.Absent {\n		r.releaseNow()"},
	{"a fence that another stream records", "1 no free in flight", "stream/lane.go",
		"	case l.tail != nil && l.tail.upto >= upto:\n		return l.tail, false\n", "	case l.tail != nil:\n		return l.tail, false\n"},
	{"a pinned buffer back in its pool before the copy", "1 no free in flight", "publish/record.go",
		"	r.fence = m\n	r.over(\"\")\n", "	r.fence = m\n	r.over(\"\")\n	if r.buf != nil {\n		r.buf.Free()\n		r.buf = nil\n	}\n"},
	{"the permanent side looked at again", "5 terminal latches", "retirequeue/queue.go",
		"			q.keep(t, err)\n		}\n", "			q.keep(t, err)\n			q.link(t)\n		}\n"},
	{"a failed mark left in its stream's list", "5 terminal latches", "stream/mark.go",
		"	l.unlinkLocked(m)\n	l.settleLocked(m, seenBad, err)\n", "	l.settleLocked(m, seenBad, err)\n"},
	{"ready on a lost context", "5 terminal latches", "stream/mark.go",
		"		return true, m.lane.core.Lost()\n", "		return true, nil\n"},
	{"readiness from an event that was not recorded", "6 readiness is observed", "stream/lane.go",
		"			list.EventRecord(ev.Handle(), l.h)\n			l.unmarked", "			if n > 0 {\n				list.EventRecord(ev.Handle(), l.h)\n			}\n			l.unmarked"},
	{"the event of a failed mark used again", "5 terminal latches", "stream/mark.go",
		"		l.events.Bar(m.ev)\n	}\n	m.ev = nil", "		l.events.Put(m.ev)\n	}\n	m.ev = nil"},
	{"not ready taken for ready", "6 readiness is observed", "stream/mark.go",
		"	case r == cuapi.Success:\n		l.completeLocked(m)", "	case r == cuapi.Success || r == cuapi.NotReady:\n		l.completeLocked(m)"},
	{"a failed query taken for not yet", "6 readiness is observed", "stream/mark.go",
		"	case err != nil:\n		l.failLocked(m, err)", "	case err != nil && l == nil:\n		l.failLocked(m, err)"},
	{"all of a stream complete with one of its marks", "6 readiness is observed", "stream/mark.go",
		"		if h == m {\n			break\n		}", "		if h == m && l.head == nil || l.head == nil {\n			break\n		}"},
	{"the enqueue lock taken by a close", "7 no lock over a blocking call", "stream/lane.go",
		"	m.upto = l.issued.Load() // all of these", "	l.enq.Lock()\n	defer l.enq.Unlock()\n	m.upto = l.issued.Load() // all of these"},
	{"the lane's lock held over a query", "7 no lock over a blocking call", "stream/mark.go",
		"	_, r := l.core.Table.Run(list)\n	list.Free()\n", "	l.mu.Lock()\n	_, r := l.core.Table.Run(list)\n	l.mu.Unlock()\n	list.Free()\n"},
	{"the runtime's lock held over an allocation", "7 no lock over a blocking call", "publish/session.go",
		"	r.block, err = st.rt.mem.Alloc(st.lane, ext.bytes)\n	if errors", "	st.rt.mu.Lock()\n	r.block, err = st.rt.mem.Alloc(st.lane, ext.bytes)\n	st.rt.mu.Unlock()\n	if errors"},
	{"the owner returned after a failed upload", "3 rejection keeps ownership", "publish/session.go",
		"	if unproven != nil {\n		taint = unproven\n		r.keep(unproven)\n		return nil, &UnprovenError{\"upload\", unproven}", "	if unproven != nil {\n		taint = unproven\n		r.buf = nil\n		r.keep(unproven)\n		block.Free()\n		return nil, &UnprovenError{\"upload\", unproven}"},
	{"the value returned after a failed publish", "3 rejection keeps ownership", "publish/session.go",
		"	rejected, unproven := outcome(st.lane.Record(&r.frontier))\n	if rejected != nil {", "	rejected, unproven := outcome(st.lane.Record(&r.frontier))\n	if unproven != nil {\n		rejected = unproven\n	}\n	if rejected != nil {"},
	{"both owners returned after a failed download", "3 rejection keeps ownership", "publish/publication.go",
		"	if rejected != nil {\n		r.ticket.Shrink(n)", "	if rejected != nil || unproven != nil {\n		r.ticket.Shrink(n)"},
	{"the value lost with a refused publish", "3 rejection keeps ownership", "publish/session.go",
		"		release := r.val.Restore()\n		r.idle.Signal()\n		if release {", "		release := r.val.Restore() || r.val.Close()\n		r.idle.Signal()\n		if release {"},
	{"no taint on what a failed launch used", "3 rejection keeps ownership", "publish/session.go",
		"	if unproven != nil {\n		taint = unproven\n		return &UnprovenError{\"launch\", unproven}", "	if unproven != nil {\n		return &UnprovenError{\"launch\", unproven}"},
	{"a publish on a stream that failed", "3 rejection keeps ownership", "publish/states.go",
		"	Publish: rule{own.Borrow, [numColumns]act{proceeds, refuses, refuses}},\n	Close:   rule{own.Close, [numColumns]act{ends", "	Publish: rule{own.Borrow, [numColumns]act{proceeds, proceeds, refuses}},\n	Close:   rule{own.Close, [numColumns]act{ends"},
	{"a close lost while busy", "2 one owner", "internal/own/cell.go",
		"		Close: {Next: Closing},\n	},\n	Closing:", "		Close: {Next: Busy},\n	},\n	Closing:"},
	{"a close lost while moving", "2 one owner", "internal/own/cell.go",
		"		Close: {Next: Revoked},\n	},\n	Revoked:", "		Close: {Next: Moving},\n	},\n	Revoked:"},
	{"a moved handle live again", "2 one owner", "internal/own/cell.go",
		"Restore: {Next: Live}, Give: {Next: Moved},", "Restore: {Next: Live}, Give: {Next: Live},"},
	{"a stream idle while it is held", "2 one owner", "stream/lane.go",
		"func (l *Lane) Hold() bool { return l.held.CompareAndSwap(false, true) }\n\n// Unhold ends the capture.\nfunc (l *Lane) Unhold() { l.held.Store(false) }", "func (l *Lane) Hold() bool { return l.held.CompareAndSwap(false, true) }\n\n// Unhold ends the capture.\nfunc (l *Lane) Unhold() { l.held.Store(false); l.Drop(); l.Retain() }"},
	{"a slot not given back", "2 one owner", "retirequeue/ticket.go",
		"	q := t.lock(\"Cancel\")\n	q.stats.Reserved--\n", "	q := t.lock(\"Cancel\")\n	if t.bytes != 7 {\n		q.stats.Reserved--\n	}\n"},
	{"bytes not given back", "2 one owner", "retirequeue/ticket.go",
		"	q.stats.ReservedBytes -= bytes\n	t.bytes -= bytes\n	q.mu.Unlock()\n	if bytes", "	t.bytes -= bytes\n	q.mu.Unlock()\n	if bytes"},
	{"a credit not returned", "9 flow control", "stream/flow.go",
		"		back := int64(n - l.retired)", "		back := int64(n-l.retired) - int64(n&1)"},
	{"no bound of what is in flight", "9 flow control", "stream/flow.go",
		"const Bound = 960", "const Bound = 96000"},
	{"a broken stream given to another session", "3 rejection keeps ownership", "stream/idle.go",
		"	if l.Failed() != nil && !l.adopted || l.core.Lost() != nil {", "	if l.core.Lost() != nil {"},
	{"the buffer of another device taken", "11 provenance", "publish/record.go",
		"	if block.Pool() != rt.pinned {", "	if block.Pool() == nil {"},
	{"the value of another stream taken", "11 provenance", "publish/session.go",
		"	case v.r.lane != st.lane:", "	case v.r.lane == nil:"},
	{"adopted memory published without the program's word", "11 provenance", "publish/session.go",
		"	if r.adopted != nil && !asserted {", "	if r.adopted != nil && asserted && !asserted {"},
	{"adopted memory let go of twice", "2 one owner", "publish/adopt.go",
		"		a.release()\n", "		a.release()\n		a.release()\n"},
	{"an abandoned owner ended by the collector", "7 no lock over a blocking call", "publish/record.go",
		"			r.rt.unburied.Add(1)\n			r.rt.left.push(r)\n			r.rt.watch()\n			return\n", "			r.bury()\n			return\n"},
	{"an abandoned owner forgotten", "2 one owner", "publish/record.go",
		"			r.rt.unburied.Add(1)\n			r.rt.left.push(r)\n			r.rt.watch()\n			return\n", "			return\n"},
}

// A find is how a mutation was found.
type find struct {
	steps int
	text  string
}

const (
	mutationSeed  = 1
	mutationSteps = 400000
	mutationTime  = 60 * time.Second // of one mutation, which only fails
)

// TestMutation breaks the library in one way after another: the simulation must
// tell, within a bounded number of steps.
func TestMutation(t *testing.T) {
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	tool, err := exec.LookPath("go")
	if err != nil {
		t.Fatalf("this test builds broken libraries, and needs the go tool: %v", err)
	}
	page := readPage(t)
	for i, m := range mutations {
		t.Run(m.name, func(t *testing.T) {
			if runtime.GOMAXPROCS(0) > 1 {
				t.Parallel()
			}
			found := m.find(t, tool, root)
			const stuck = "does not return"
			if strings.Contains(found.text, stuck) && !strings.Contains(page.told(i), stuck) && !*writeFlag {
				t.Errorf("it was stuck, and the page says that something tells: %s", found.text)
			}
			page.row(i, fmt.Sprintf("| %s | %s | `%s` | %d | %s |", m.name, m.law, m.file, found.steps, found.text))
		})
	}
	t.Cleanup(func() { page.check(t) })
}

var foundLine = regexp.MustCompile(`(?m)^FOUND (?:after (\d+) steps: )?world (\d+) of seed \d+, step (\d+): (.*)$`)

// find builds the broken library and runs it until the simulation tells.
func (m mutation) find(t *testing.T, tool, root string) find {
	dir := t.TempDir()
	at := filepath.Join(root, filepath.FromSlash(m.file))
	text, err := os.ReadFile(at)
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(text), m.old); n != 1 {
		t.Fatalf("what is to be broken stands %d times in %s:\n%s", n, m.file, m.old)
	}
	broken, overlay, binary := filepath.Join(dir, "broken.go"), filepath.Join(dir, "overlay.json"), filepath.Join(dir, "dst.test")
	if err := os.WriteFile(broken, []byte(strings.Replace(string(text), m.old, m.new, 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	list, err := json.Marshal(map[string]map[string]string{"Replace": {at: broken}})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(overlay, list, 0o600); err != nil {
		t.Fatal(err)
	}
	build := exec.CommandContext(t.Context(), tool, "test", "-c", "-ldflags=-s -w", "-overlay", overlay, "-o", binary, ".")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("it does not build: %v\n%s", err, out)
	}
	return m.run(t, binary)
}

func (m mutation) run(t *testing.T, binary string) (f find) {
	began := time.Now()
	cmd := exec.CommandContext(t.Context(), binary, "-test.timeout", mutationTime.String(),
		"-seed", fmt.Sprint(mutationSeed), "-steps", fmt.Sprint(mutationSteps), "-hang", "5s")
	cmd.Dir = t.TempDir()
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	match := foundLine.FindStringSubmatch(string(out))
	if !errors.As(err, &exit) || match == nil {
		t.Fatalf("it was not found, in %v: %v\n%.2000s", time.Since(began), err, out)
	}
	var before, world, step int
	fmt.Sscan(match[1], &before)
	fmt.Sscan(match[2], &world)
	fmt.Sscan(match[3], &step)
	f.steps = before
	if match[1] == "" {
		f.steps = world*800 + step // where it got stuck nobody counted
	}
	f.text = short(match[4])
	t.Logf("found in %v, within %d steps: %s", time.Since(began), f.steps, f.text)
	return f
}

// numbers are what is not the same from one version to the next.
var numbers = regexp.MustCompile(`0x[0-9a-f]+`)

func short(text string) string {
	text = strings.ReplaceAll(numbers.ReplaceAllString(text, "…"), "|", "/")
	if r := []rune(text); len(r) > 110 {
		text = string(r[:110]) + "…"
	}
	return text
}
