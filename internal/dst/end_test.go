package dst

import (
	"bytes"
	"slices"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/wire"
	"github.com/purecuda/purecuda/publish"
)

func (w *world) close() {
	if len(w.lives) == 0 {
		return
	}
	l := w.lives[w.rng.IntN(len(w.lives))]
	if w.guard.depth > 0 && w.chance(1, 2) { // one that the call in progress uses
		if i := slices.IndexFunc(w.lives, func(o *life) bool { return o.busy > 0 || o.moving }); i >= 0 {
			l = w.lives[i]
		}
	}
	w.guard.dev = l.rt.dev
	if l.moving {
		l.revoked = true
	}
	w.closeLife(l)
}

func (w *world) closeLife(l *life) {
	v, p, t, st := l.v, l.p, l.t, l.stage
	if !l.moving {
		w.end(l)
	}
	switch st {
	case value:
		v.Close()
		w.is(v.Err(), driver.ErrClosed, "a value that was closed")
	case publication:
		p.Close()
		w.is(p.Err(), driver.ErrClosed, "a publication that was closed")
	case download, upload:
		t.Close()
		if !l.waiting { // it may be on its way to who waits for it
			w.is(t.Err(), driver.ErrClosed, "a transfer that was closed")
		}
	}
}

func (w *world) closeAgain() {
	h, ok := pick(w, w.past)
	if !ok {
		return
	}
	switch h := h.(type) {
	case *session:
		h.s.Close()
	case *publish.Value:
		h.Close()
		h.Leak()
	case *publish.Publication:
		h.Close()
		h.Leak()
	case *publish.Transfer:
		h.Close()
		h.Leak()
	case *buffer:
		h.b.Close()
	}
}

func (w *world) leak() {
	l, ok := pick(w, w.lives)
	if !ok || l.busy > 0 || l.moving {
		return
	}
	w.guard.dev = l.rt.dev
	l.rt.leaks++
	if !l.tainted {
		l.rt.keeps++
	}
	if l.buf > 0 {
		l.rt.dev.kept++
	}
	v, p, t, st := l.v, l.p, l.t, l.stage
	w.end(l)
	switch st {
	case value:
		v.Leak()
	case publication:
		p.Leak()
	default:
		t.Leak()
	}
}

// abandon does what the collector does with a handle that was dropped.
func (w *world) abandon() {
	if w.chance(1, 3) {
		if s, ok := pick(w, w.sessions); ok && w.guard.depth == 0 {
			w.guard.dev = s.rt.dev
			w.forget(s)
			calls := w.stats.calls
			wire.Abandon(s.s)
			if w.stats.calls != calls {
				w.fail("the cleanup of a session calls the driver")
			}
		}
		return
	}
	if b, ok := pick(w, w.bufs); ok && w.chance(1, 8) && !b.moving {
		w.lost(b)
		if b.shown {
			b.dev.stranded++
		}
		wire.Abandon(b.b)
		return
	}
	l, ok := pick(w, w.lives)
	if !ok || l.busy > 0 || l.moving {
		return
	}
	w.guard.dev = l.rt.dev
	calls := w.stats.calls
	st := l.stage
	w.end(l)
	w.past = w.past[:len(w.past)-1] // nobody has it
	l.rt.dropped++
	switch st {
	case value:
		wire.Abandon(l.v)
	case publication:
		wire.Abandon(l.p)
	default:
		wire.Abandon(l.t)
	}
	if w.stats.calls != calls {
		w.fail("the cleanup of a %v calls the driver", st)
	}
}

func (w *world) compare(got, want []byte, what string) {
	if want != nil && !bytes.Equal(got, want) {
		at := 0
		for at < len(got) && at < len(want) && got[at] == want[at] {
			at++
		}
		w.fail("%s: %d bytes, and byte %d is not what was written", what, len(got), at)
	}
}
