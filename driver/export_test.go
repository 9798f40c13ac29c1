package driver

import (
	"reflect"
	"strings"
)

// DriverOf is what Open does with a library that it found.
var DriverOf = driverOf

// ContextTable returns the table of a context in words, by method: what is done
// in the states open, ending, gone and stuck.
func ContextTable() map[string]string {
	words := map[string]string{}
	v := reflect.ValueOf(contextTable)
	for i := range v.NumField() {
		var row []string
		for s := range numContextStates {
			act := contextAct(v.Field(i).Index(int(s)).Uint())
			row = append(row, [...]string{"proceeds", "waits", "renews", "answers", "refuses"}[act])
		}
		words[v.Type().Field(i).Name] = strings.Join(row, " ")
	}
	return words
}

// StateOf returns the state of a context, in words.
func StateOf(c *Context) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return [...]string{"open", "ending", "gone", "stuck"}[c.state]
}
