package own

import (
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
)

// reach brings a fresh cell into a state by actions alone.
var reach = map[State][]Action{
	Absent:  {},
	Live:    {Open},
	Busy:    {Open, Borrow},
	Closing: {Open, Borrow, Close},
	Moving:  {Open, Take},
	Revoked: {Open, Take, Close},
	Moved:   {Open, Take, Give},
	Closed:  {Open, Close},
}

// want says in words what each action does in each state, apart from Table:
// "state", "state err", "state!" for a release due, "panic".
var want = map[State]map[Action]string{
	Absent:  {Open: "live", Ask: "absent closed", Borrow: "absent closed", Return: "panic", Take: "absent closed", Restore: "panic", Give: "panic", Close: "absent"},
	Live:    {Open: "panic", Ask: "live", Borrow: "busy", Return: "panic", Take: "moving", Restore: "panic", Give: "panic", Close: "closed!"},
	Busy:    {Open: "panic", Ask: "busy", Borrow: "busy", Return: "live", Take: "busy busy", Restore: "panic", Give: "panic", Close: "closing"},
	Closing: {Open: "panic", Ask: "closing closed", Borrow: "closing closed", Return: "closed!", Take: "closing closed", Restore: "panic", Give: "panic", Close: "closing"},
	Moving:  {Open: "panic", Ask: "moving", Borrow: "moving busy", Return: "panic", Take: "moving busy", Restore: "live", Give: "moved", Close: "revoked"},
	Revoked: {Open: "panic", Ask: "revoked closed", Borrow: "revoked closed", Return: "panic", Take: "revoked closed", Restore: "closed!", Give: "moved", Close: "revoked"},
	Moved:   {Open: "panic", Ask: "moved moved", Borrow: "moved moved", Return: "panic", Take: "moved moved", Restore: "panic", Give: "panic", Close: "moved"},
	Closed:  {Open: "panic", Ask: "closed closed", Borrow: "closed closed", Return: "panic", Take: "closed closed", Restore: "panic", Give: "panic", Close: "closed"},
}

func TestTableEveryActionInEveryState(t *testing.T) {
	for s := Absent; s < NumStates; s++ {
		for a := Open; a < NumActions; a++ {
			var c Cell
			for _, step := range reach[s] {
				c.Do(step)
			}
			if c.State() != s {
				t.Fatalf("reach[%v] ends in %v", s, c.State())
			}
			if got := describe(&c, a); got != want[s][a] {
				t.Errorf("%v of a cell that is %v: %q, want %q", a, s, got, want[s][a])
			}
		}
	}
}

func describe(c *Cell, a Action) (text string) {
	defer func() {
		if recover() != nil {
			text = "panic"
		}
	}()
	step := c.Do(a)
	text = c.State().String()
	switch step.Err {
	case ErrMoved:
		text += " moved"
	case ErrClosed:
		text += " closed"
	case ErrBusy:
		text += " busy"
	}
	if step.Release {
		text += "!"
	}
	return text
}

func TestBorrowsNest(t *testing.T) {
	var c Cell
	c.Open()
	for range 3 {
		if err := c.Borrow(); err != nil {
			t.Fatal(err)
		}
	}
	if c.Close() {
		t.Fatal("a close while borrowed released at once")
	}
	for range 2 {
		if c.Return() {
			t.Fatal("released before the last borrow came back")
		}
	}
	if !c.Return() {
		t.Fatal("the last borrow did not release")
	}
}

// Many goroutines borrow, move and close one cell, and a cleanup closes it
// too: the thing is released exactly once or moved exactly once.
func TestHammer(t *testing.T) {
	for range 2000 {
		c := new(Cell)
		c.Open()
		var released, moved, using atomic.Int32
		release := func(due bool) {
			if due {
				if using.Load() != 0 {
					t.Error("released while in use")
				}
				released.Add(1)
			}
		}
		var wg sync.WaitGroup
		for g := range 8 {
			wg.Go(func() {
				switch g % 4 {
				case 0, 1:
					if c.Borrow() == nil {
						using.Add(1)
						runtime.Gosched()
						using.Add(-1)
						release(c.Return())
					}
				case 2:
					if c.Take() == nil {
						if g == 2 {
							release(c.Restore())
						} else {
							c.Give()
							moved.Add(1)
						}
					}
				case 3:
					release(c.Close())
				}
			})
		}
		wg.Wait()
		release(c.Close())
		if n := released.Load() + moved.Load(); n != 1 {
			t.Fatalf("released %d times, moved %d times", released.Load(), moved.Load())
		}
	}
}

// A cleanup that closes races a call in progress.
func TestHammerCleanup(t *testing.T) {
	type handle struct {
		cell *Cell
		_    [16]byte
	}
	for range 200 {
		c := new(Cell)
		c.Open()
		var released atomic.Int32
		done := make(chan struct{})
		h := &handle{cell: c}
		runtime.AddCleanup(h, func(c *Cell) {
			if c.Close() {
				released.Add(1)
			}
			close(done)
		}, c)
		if h.cell.Borrow() != nil {
			t.Fatal("a live cell refused a borrow")
		}
		var wg sync.WaitGroup
		wg.Go(func() { runtime.GC() })
		if h.cell.Return() {
			t.Fatal("closed while its handle was reachable")
		}
		runtime.KeepAlive(h)
		h = nil
		wg.Wait()
		for closed := false; !closed; {
			runtime.GC()
			select {
			case <-done:
				closed = true
			default:
				runtime.Gosched()
			}
		}
		if released.Load() != 1 {
			t.Fatalf("released %d times", released.Load())
		}
	}
}
