package pinned_test

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"testing"

	"github.com/purecuda/purecuda/internal/own"
	"github.com/purecuda/purecuda/internal/wire"
	"github.com/purecuda/purecuda/pinned"
)

// promised says in words how a buffer ends, apart from the table.
var promised = map[string]string{
	"Close/private": "frees", "Close/shown": "frees",
	"Abandon/private": "hands", "Abandon/shown": "strands",
}

// does is what each method does to the cell. Len answers in every state.
var does = map[string]own.Action{"Bytes": own.Borrow, "Err": own.Ask, "Close": own.Close, "Abandon": own.Close}

// A way leads to a state of the cell, and out of it again.
type way struct {
	state own.State
	in    func(b *pinned.Buffer, c *own.Cell)
	out   func(b *pinned.Buffer, c *own.Cell)
}

func stay(*pinned.Buffer, *own.Cell) {}

// refuse ends a move that was refused, as package publish does.
func refuse(b *pinned.Buffer, c *own.Cell) {
	if c.Restore() {
		_, block := wire.BufferOf(b)
		block.(*pinned.Block).Free()
	}
}

var ways = []way{
	{own.Live, stay, stay},
	{own.Busy, func(_ *pinned.Buffer, c *own.Cell) { c.Borrow() }, func(b *pinned.Buffer, _ *own.Cell) { pinned.EndUse(b) }},
	{own.Closing, func(b *pinned.Buffer, c *own.Cell) { c.Borrow(); b.Close() }, func(b *pinned.Buffer, _ *own.Cell) { pinned.EndUse(b) }},
	{own.Moving, func(_ *pinned.Buffer, c *own.Cell) { c.Take() }, refuse},
	{own.Revoked, func(b *pinned.Buffer, c *own.Cell) { c.Take(); b.Close() }, refuse},
	{own.Moved, func(_ *pinned.Buffer, c *own.Cell) { c.Take(); c.Give() }, stay},
	{own.Closed, func(b *pinned.Buffer, _ *own.Cell) { b.Close() }, stay},
}

// TestStates calls each method of a buffer in each state of its cell, before and
// after its memory was shown.
func TestStates(t *testing.T) {
	if table := pinned.BufferTable(); !reflect.DeepEqual(table, promised) {
		t.Errorf("the table says %v, promised is %v", table, promised)
	}
	typ := reflect.TypeFor[*pinned.Buffer]()
	for i := range typ.NumMethod() {
		if name := typ.Method(i).Name; name != "Len" && !slices.Contains([]string{"Bytes", "Err", "Close"}, name) {
			t.Errorf("%s has neither a row nor answers always", name)
		}
	}
	for _, condition := range []string{"private", "shown"} {
		for _, w := range ways {
			for method, action := range does {
				t.Run(fmt.Sprintf("buffer/%v-%s/%s", w.state, condition, method), func(t *testing.T) {
					meet(t, condition, w, method, own.Table[w.state][action])
				})
			}
		}
	}
	for name, b := range map[string]*pinned.Buffer{"nil": nil, "zero": {}} {
		t.Run("buffer/"+name, func(t *testing.T) {
			pinned.Abandon(b)
			if b.Len() != 0 || b.Bytes() != nil || !errors.Is(b.Err(), own.ErrClosed) || b.Close() != nil {
				t.Error("not as a closed one")
			}
		})
	}
}

func meet(t *testing.T, condition string, w way, method string, step own.Step) {
	r := newRig(t)
	b := r.take(100)
	if condition == "shown" && len(b.Bytes()) != 100 {
		t.Fatal("not shown")
	}
	cell, _ := wire.BufferOf(b)
	w.in(b, cell)
	if cell.State() != w.state {
		t.Fatalf("the cell is %v", cell.State())
	}
	before := r.pool.Stats()
	end := ""
	switch method {
	case "Bytes":
		if p := b.Bytes(); (p != nil) != (step.Err == nil) || p != nil && len(p) != 100 {
			t.Errorf("%d bytes", len(p))
		} else if p != nil {
			condition = "shown"
		}
	case "Err":
		if err := b.Err(); !errors.Is(err, step.Err) || (err == nil) != (step.Err == nil) {
			t.Errorf("%v, want %v", err, step.Err)
		}
	case "Close":
		must(t, b.Close())
		end = "Close"
	case "Abandon":
		pinned.Abandon(b)
		end = "Abandon"
	}
	after := before
	give := func(end string) { // where the block must be then
		if promised[end+"/"+condition] == "strands" {
			after.Abandoned++
		} else {
			after.InUse--
		}
	}
	if step.Release {
		give(end)
	}
	next := w.state
	if end != "" {
		next = step.Next
	}
	if s := r.pool.Stats(); s != after || cell.State() != next || b.Len() != 100 {
		t.Errorf("%+v and %v, want %+v and %v", s, cell.State(), after, next)
	}
	w.out(b, cell)
	if next == own.Closing || next == own.Revoked {
		give("Close") // the handle is there: a use ends with it
	}
	if s := r.pool.Stats(); s != after {
		t.Errorf("at the end %+v, want %+v", s, after)
	}
	if cell.State() == own.Live && end == "" {
		if len(b.Bytes()) != 100 { // and it goes on to work
			t.Error("of no use afterwards")
		}
	}
	must(t, b.Close())
	r.keep = w.state == own.Moved || after.Abandoned > 0
}
