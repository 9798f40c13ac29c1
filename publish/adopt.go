package publish

import (
	"errors"
	"fmt"
	"runtime"

	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/memory"
)

var (
	// ErrNotDevice: the address is not plain device memory of the session's
	// device, or the extent reaches past its allocation.
	ErrNotDevice = errors.New("not device memory of this extent")
	// ErrProvenance: the value was adopted, so that nothing proves that its
	// last write is behind the stream. PublishAsserted takes the program's word.
	ErrProvenance = errors.New("adopted memory has no proven producer")
)

// Adopt makes a value of device memory that other code allocated. It belongs to
// the session's stream from then on. release is called at most once, on a
// goroutine of its own, when the device is observed to be done with the memory; it
// may be nil. Where that can not be proven it is never called, as after a failed
// enqueue, on a lost context, or for a value that was leaked.
//
// release may take its time: nothing waits for it but [Runtime.Shutdown], and
// until it has returned the context can not be shut down under it. So it must
// wait neither for these two nor for whoever calls them. It is not called when
// Adopt is rejected, and once for each Adopt of one address. A panic in it is caught and counted in
// [Stats].Panics, and a panic and [runtime.Goexit] end it as a return does.
//
// The driver is asked what the address is (cuPointerGetAttribute), so Adopt is
// set-up: host, managed and unknown addresses, memory of another device or, where
// the driver tells, of another context, and extents past the allocation are
// rejected with ErrNotDevice. It enqueues nothing. Only
// [Session.PublishAsserted] publishes an adopted value.
func (s *Session) Adopt(address uint64, d DType, shape []int, release func()) (*Value, error) {
	reject := func(reason error) (*Value, error) { return nil, &RejectedError{Op: "adopt", Reason: reason} }
	st, err := s.begin()
	if err != nil {
		return reject(err)
	}
	defer s.end()
	ext, err := extentOf(d, shape)
	if err != nil {
		return reject(err)
	}
	if err := st.rt.isDevice(cuapi.DevicePtr(address), ext.bytes); err != nil {
		return reject(err)
	}
	lf, err := st.rt.newLife(st.lane, true, ext.bytes)
	if err != nil {
		return reject(err)
	}
	r := lf.value.r
	r.extent = ext
	r.block = &memory.Block{Addr: cuapi.DevicePtr(address), Bytes: ext.bytes}
	r.adopted = &adoption{rt: st.rt, release: release}
	r.use(st.lane.Issued())
	r.born("value")
	r.val.Open()
	st.values.Add(1)
	return &lf.value, nil
}

// An adoption is how adopted memory is let go.
type adoption struct {
	rt      *Runtime
	release func()
}

// free starts the release. Until it ends it is a record that is being ended, for
// which Shutdown waits, and it pins the context that the memory may belong to.
func (a *adoption) free() {
	if a.release == nil {
		return
	}
	a.rt.retain()
	a.rt.unburied.Add(1)
	a.rt.watcher.Go(func() {
		defer func() { // also of Goexit, where there is nothing to recover
			if recover() != nil {
				a.rt.panics.Add(1)
			}
			a.rt.unpin()
			a.rt.unburied.Add(-1) // the last: a Shutdown that returns finds the context free
		}()
		a.release()
	})
}

// PublishAsserted publishes an adopted value on the program's word that its last
// write is ordered before the session's stream. If it is not, a consumer reads
// bytes that are not there yet. For all else it is as Publish.
func (s *Session) PublishAsserted(v *Value) (*Publication, error) { return s.publish(v, true) }

// isDevice tells why n bytes at addr are not plain memory of this device.
func (rt *Runtime) isDevice(addr cuapi.DevicePtr, n int64) error {
	out := make([]uint64, 1) // an attribute's value, of up to 64 bits
	ask := func(attr int32) (uint64, error) {
		out[0] = 0
		r := rt.core.Table.PointerGetAttribute(cuapi.WordPtr(&out[0]), attr, addr)
		runtime.KeepAlive(out)
		if r == cuapi.Success {
			return out[0], nil
		}
		err := rt.core.Fail(cuapi.IDPointerGetAttribute, r, fmt.Sprintf("attribute %d of %#x", attr, uint64(addr)))
		if r == cuapi.InvalidValue {
			err = fmt.Errorf("%w: CUDA does not know %#x: %w", ErrNotDevice, uint64(addr), err)
		}
		return 0, err
	}
	kind, err := ask(cuapi.PointerMemoryType)
	if err != nil {
		return err
	}
	if uint32(kind) != cuapi.MemoryTypeDevice {
		return fmt.Errorf("%w: %#x is memory of type %d", ErrNotDevice, uint64(addr), uint32(kind))
	}
	managed, err := ask(cuapi.PointerIsManaged)
	if err != nil {
		return err
	}
	if uint32(managed) != 0 {
		return fmt.Errorf("%w: %#x is managed memory", ErrNotDevice, uint64(addr))
	}
	ordinal, err := ask(cuapi.PointerOrdinal)
	if err != nil {
		return err
	}
	if int32(uint32(ordinal)) != int32(rt.core.Device) {
		return fmt.Errorf("%w: %#x is memory of device %d, not %d", ErrNotDevice, uint64(addr), int32(uint32(ordinal)), rt.core.Device)
	}
	// Memory of a pool has no context, a null one as measured (docs/driver-facts.md):
	// then there is none to compare. A driver that answers 1 means none, too.
	ctx, err := ask(cuapi.PointerContext)
	switch {
	case errors.Is(err, ErrNotDevice):
	case err != nil:
		return err
	case ctx != 0 && cuapi.Context(ctx) != rt.core.Raw:
		return fmt.Errorf("%w: %#x is memory of another context", ErrNotDevice, uint64(addr))
	}
	start, err := ask(cuapi.PointerRangeStart)
	if err != nil {
		return err
	}
	size, err := ask(cuapi.PointerRangeSize)
	if err != nil {
		return err
	}
	if at := uint64(addr) - start; uint64(addr) < start || at > size || uint64(n) > size-at {
		return fmt.Errorf("%w: %d bytes at %#x reach past the allocation of %d bytes at %#x", ErrNotDevice, n, uint64(addr), size, start)
	}
	return nil
}
