package publish_test

import (
	"errors"
	"testing"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
)

// The event of a record that failed is never used again, and ends with the
// context: the simulator's close finds nothing left.
func TestEventsOfFailedRecordsEnd(t *testing.T) {
	f := &trip{}
	r := newRig(t, options{around: f.around})
	s := r.session()
	for _, after := range []bool{false, true} {
		f.next(cuapi.IDEventRecord, cuapi.InvalidValue, after)
		if err := s.Synchronize(r.within()); !errors.Is(err, driver.ErrInvalidValue) {
			t.Error(err)
		}
		f.stop(t)
	}
	must(t, s.Close())
}
