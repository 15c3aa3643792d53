(function () {
  'use strict';
  var data = JSON.parse(document.getElementById('data').textContent);
  document.documentElement.classList.add('js');

  function size(bytes) {
    var units = ['B', 'kB', 'MB', 'GB', 'TB', 'PB', 'EB'], unit = 0;
    while (bytes >= 999.5 && unit < 6) { bytes /= 1000; unit++; }
    return Number(bytes.toPrecision(3)) + ' ' + units[unit];
  }

  // Tabs: a click, or the arrows, Home and End.
  document.querySelectorAll('.tabs').forEach(function (tabs) {
    var buttons = [].slice.call(tabs.querySelectorAll(':scope > [role=tablist] > [role=tab]'));
    function show(nth, focus) {
      buttons.forEach(function (button, at) {
        var chosen = at === nth;
        button.setAttribute('aria-selected', chosen);
        button.tabIndex = chosen ? 0 : -1;
        document.getElementById(button.getAttribute('aria-controls')).hidden = !chosen;
        if (chosen && focus) button.focus();
      });
    }
    buttons.forEach(function (button, nth) {
      button.addEventListener('click', function () { show(nth, false); });
      button.addEventListener('keydown', function (event) {
        var count = buttons.length;
        var to = {
          ArrowRight: (nth + 1) % count, ArrowLeft: (nth + count - 1) % count,
          Home: 0, End: count - 1
        }[event.key];
        if (to !== undefined) { show(to, true); event.preventDefault(); }
      });
    });
    show(0, false);
  });

  // Where in a picture a pointer is, in the picture's own units.
  function place(svg, event) {
    var box = svg.getBoundingClientRect(), view = svg.viewBox.baseVal;
    return {
      x: (event.clientX - box.left) / box.width * view.width,
      y: (event.clientY - box.top) / box.height * view.height
    };
  }

  // Memory: a cursor, and what is held there.
  document.querySelectorAll('svg[data-held]').forEach(function (svg) {
    var name = svg.dataset.held, d = data[name], at = d.peak, count = d.task.length;
    var out = document.getElementById('at-' + name), cursor = svg.querySelector('.cursor');
    function show(nth) {
      at = Math.max(0, Math.min(count - 1, nth));
      var x = (d.x[at] + d.x[at + 1]) / 2, total = 0, parts = [];
      cursor.setAttribute('d', 'M' + x + ' ' + d.top + 'V' + d.bottom);
      Object.keys(d.held).forEach(function (category) {
        var bytes = d.held[category][at];
        total += bytes;
        if (bytes) parts.push(category.replace('_', ' ') + ' ' + size(bytes));
      });
      out.textContent = size(total) + ': ' + d.task[at] + ': ' + parts.join(', ');
    }
    svg.addEventListener('pointermove', function (event) {
      var x = place(svg, event).x, nth = 0;
      while (nth < count - 1 && d.x[nth + 1] < x) nth++;
      show(nth);
    });
    svg.addEventListener('focus', function () { show(at); });
    svg.addEventListener('keydown', function (event) {
      var by = event.shiftKey ? 10 : 1;
      var to = {
        ArrowLeft: at - by, ArrowRight: at + by, Home: 0, End: count - 1, p: d.peak, P: d.peak
      }[event.key];
      if (to !== undefined) { show(to); event.preventDefault(); }
    });
  });

  // The matrix: a square, and who sends how much to whom there.
  document.querySelectorAll('svg[data-matrix]').forEach(function (svg) {
    var name = svg.dataset.matrix, d = data[name], count = d.bytes.length, row = 0, column = 0;
    var out = document.getElementById('at-' + name), cursor = svg.querySelector('.cursor');
    var cell = d.side / count;
    function ranks(nth) {
      var first = d.edges[nth], last = d.edges[nth + 1] - 1;
      return first === last ? 'rank ' + first : 'ranks ' + first + '-' + last;
    }
    function show(y, x) {
      row = Math.max(0, Math.min(count - 1, y));
      column = Math.max(0, Math.min(count - 1, x));
      cursor.setAttribute('d', 'M' + (d.left + column * cell) + ' ' + (d.top + row * cell) +
        'h' + cell + 'v' + cell + 'h' + -cell + 'z');
      var bytes = d.bytes[row][column];
      out.textContent = ranks(row) + (d.edges[row + 1] - d.edges[row] > 1 ? ' send ' : ' sends ') +
        (row === column ? (d.edges[1] > 1 ? 'each other ' : 'itself ') : ranks(column) + ' ') +
        (bytes ? size(bytes) : 'nothing');
    }
    svg.addEventListener('pointermove', function (event) {
      var at = place(svg, event);
      show(Math.floor((at.y - d.top) / cell), Math.floor((at.x - d.left) / cell));
    });
    svg.addEventListener('focus', function () { show(row, column); });
    svg.addEventListener('keydown', function (event) {
      var move = {
        ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]
      }[event.key];
      if (move) { show(row + move[0], column + move[1]); event.preventDefault(); }
    });
  });

  // Paper has no closed details.
  var closed = [];
  window.addEventListener('beforeprint', function () {
    closed = [].slice.call(document.querySelectorAll('details[data-print]:not([open])'));
    closed.forEach(function (each) { each.open = true; });
  });
  window.addEventListener('afterprint', function () {
    closed.forEach(function (each) { each.open = false; });
  });
})();
