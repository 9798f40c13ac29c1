package publish_test

import (
	"context"
	"testing"

	"github.com/purecuda/purecuda/publish"
)

// BenchmarkCycle is publish, download, wait and close of 4 KiB on the
// simulator: its allocations are those on hardware, its time is not.
func BenchmarkCycle(b *testing.B) {
	r := newRig(b, options{})
	s := r.session()
	out, err := r.rt.Pinned(4096)
	must(b, err)
	b.ReportAllocs()
	for b.Loop() {
		v, err := s.Alloc(publish.U8, 4096)
		if err != nil {
			b.Fatal(err)
		}
		p, err := s.Publish(v)
		if err != nil {
			b.Fatal(err)
		}
		tr, err := p.DownloadInto(out)
		if err != nil {
			b.Fatal(err)
		}
		if out, err = tr.Wait(context.Background()); err != nil {
			b.Fatal(err)
		}
	}
	must(b, out.Close())
	must(b, s.Close())
}
